#include "mapped.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace naru {
namespace {

// Pages are asked for in pieces that stay in the L2 cache until they are summed.
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kAheadBytes = 8192;

bool populate(const uint8_t* address, size_t bytes) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + bytes + page - 1) & ~(page - 1);
  for (;;) {
    if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ) == 0) return true;
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return false;
    break;
  }
  // A kernel without it: touch.
  for (uintptr_t p = begin; p < end; p += page) *reinterpret_cast<const volatile uint8_t*>(p);
  return true;
}

uint64_t sum_words(const uint8_t* p, size_t bytes) {
  uint64_t lanes[32] = {};
  size_t i = 0;
  for (; i + sizeof(lanes) <= bytes; i += sizeof(lanes)) {
    uint64_t words[32];
    // Asked for ahead of use, one core reads memory nearly twice as fast; past the end it does no harm.
    for (int j = 0; j < 4; ++j) __builtin_prefetch(p + i + kAheadBytes + j * 64, 0, 2);
    memcpy(words, p + i, sizeof(words));
    for (int j = 0; j < 32; ++j) lanes[j] += words[j];
  }
  uint64_t sum = 0;
  for (uint64_t lane : lanes) sum += lane;
  for (; i < bytes; i += 8) {
    uint64_t word = 0;
    memcpy(&word, p + i, bytes - i < 8 ? bytes - i : 8);
    sum += word;
  }
  return sum;
}

}  // namespace

bool fault_in(const uint8_t* address, size_t bytes, uint64_t* sums, size_t chunk_bytes) {
  if (sums == nullptr) return bytes == 0 || populate(address, bytes);
  size_t present = 0;
  for (size_t at = 0; at < bytes; at += chunk_bytes) {
    const size_t end = bytes - at < chunk_bytes ? bytes : at + chunk_bytes;
    if (end > present) {
      const size_t wanted = end - present < kPieceBytes ? kPieceBytes : end - present;
      const size_t piece = bytes - present < wanted ? bytes - present : wanted;
      if (!populate(address + present, piece)) return false;
      present += piece;
    }
    *sums++ = sum_words(address + at, end - at);
  }
  return true;
}

}  // namespace naru
