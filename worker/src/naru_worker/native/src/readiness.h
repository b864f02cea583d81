// How much of a model's image is present while it is still being read in, and waiting for more.
#pragma once

#include <atomic>
#include <cstdint>

namespace naru {

constexpr uint64_t kAllBytes = ~uint64_t{0};

class Readiness {
 public:
  enum State { kReady, kPending, kFailed };

  // Before the first step: how much is present then.
  void start_from(uint64_t bytes) { bytes_.store(bytes, std::memory_order_release); }

  // The first `bytes` of the image are present; never fewer than before. Any thread.
  void set(uint64_t bytes);

  // No more will come. Any thread.
  void fail();

  uint64_t bytes() const { return bytes_.load(std::memory_order_acquire); }

  // Waits for the first `bytes`, at most until `deadline_ns` of the monotonic clock.
  State await(uint64_t bytes, int64_t deadline_ns);

 private:
  void announce();

  std::atomic<uint64_t> bytes_{kAllBytes};
  std::atomic<bool> failed_{false};
  std::atomic<uint32_t> changes_{0};
};

int64_t monotonic_ns();

}  // namespace naru
