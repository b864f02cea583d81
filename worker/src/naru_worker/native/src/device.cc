#include "device.h"

namespace naru {
namespace {

// Addresses, not memory. Where a limit on them is set, a part of it will do.
constexpr size_t kMostBytes = size_t{64} << 30;
constexpr size_t kLeastBytes = size_t{256} << 20;

}  // namespace

bool Device::reserve() {
  for (size_t bytes = kMostBytes; bytes >= kLeastBytes; bytes /= 2)
    if (workspace_.reserve_addresses(bytes)) return true;
  return false;
}

uint8_t* Device::claim(size_t bytes) {
  if (bytes > workspace_.size()) return nullptr;
  size_t most = claimed_.load();
  while (most < bytes && !claimed_.compare_exchange_weak(most, bytes)) {
  }
  if (most < bytes) workspace_.prefer_huge(bytes);
  return workspace_.base();
}

void Device::run(void (*job)(void*, int), void* ctx) {
  pthread_mutex_lock(&turn_);
  pool_.run(job, ctx);
  pthread_mutex_unlock(&turn_);
}

}  // namespace naru
