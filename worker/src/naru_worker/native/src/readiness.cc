#include "readiness.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace naru {

int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

void Readiness::set(uint64_t bytes) {
  uint64_t now = bytes_.load();
  while (now < bytes && !bytes_.compare_exchange_weak(now, bytes)) {
  }
  if (now < bytes) announce();
}

void Readiness::fail() {
  failed_.store(true);
  announce();
}

void Readiness::announce() {
  changes_.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&changes_), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

Readiness::State Readiness::await(uint64_t bytes, int64_t deadline_ns) {
  for (;;) {
    // Read before the state: a change in between ends the sleep at once.
    const uint32_t seen = changes_.load();
    if (failed_.load()) return kFailed;
    if (bytes_.load() >= bytes) return kReady;
    const int64_t left = deadline_ns - monotonic_ns();
    if (left <= 0) return kPending;
    timespec t;
    t.tv_sec = static_cast<time_t>(left / 1000000000);
    t.tv_nsec = static_cast<long>(left % 1000000000);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&changes_), FUTEX_WAIT_PRIVATE, seen, &t, nullptr, 0);
  }
}

}  // namespace naru
