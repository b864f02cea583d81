// What all models of a process share: the threads that compute, and the memory of activations.
//
// A model computes alone: nothing in the workspace outlives a step, and a step must not read what it did not write, for
// another model's bytes lie there.
#pragma once

#include <pthread.h>

#include <atomic>

#include "arena.h"
#include "threads.h"

namespace naru {

class Device {
 public:
  explicit Device(int num_threads) : pool_(num_threads) {}
  ~Device() { pthread_mutex_destroy(&turn_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Sets the workspace's addresses aside. False: no room for them.
  bool reserve();

  // The first `bytes` of the workspace, for one more model; null when it has fewer. Any thread.
  uint8_t* claim(size_t bytes);

  // Runs job(ctx, member) on all members and returns when all are done. Callers on several threads take turns.
  void run(void (*job)(void*, int), void* ctx);

  Pool& pool() { return pool_; }
  uint8_t* workspace() const { return workspace_.base(); }
  // The most that any model has claimed.
  size_t claimed() const { return claimed_.load(std::memory_order_relaxed); }

 private:
  Pool pool_;
  Arena workspace_;
  std::atomic<size_t> claimed_{0};
  pthread_mutex_t turn_ = PTHREAD_MUTEX_INITIALIZER;
};

}  // namespace naru
