// A persistent pool whose members walk one job together and meet at barriers. The caller is member 0.
//
// Members spin for a few tens of microseconds and then sleep on a futex, so that an idle engine costs nothing and the
// other processes of a two-core machine are not starved.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace naru {

// Splits [0, n) evenly: member's part is [begin, end).
inline void even_part(int n, int member, int size, int* begin, int* end) {
  *begin = static_cast<int>(static_cast<int64_t>(n) * member / size);
  *end = static_cast<int>(static_cast<int64_t>(n) * (member + 1) / size);
}

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Runs job(ctx, member) on all members and returns when all are done.
  void run(void (*job)(void*, int), void* ctx);

  // Wakes sleeping members ahead of a run() that comes within microseconds.
  void wake();

  // Inside a job: waits for all members; afterwards the chunk counter is back at 0.
  void barrier();

  // Inside a job: the next number of the section since the last barrier, from 0.
  int next() { return work_.fetch_add(1, std::memory_order_relaxed); }

  // A member's way through `n` pieces: first its even part in order, so that it can fetch ahead, then what others have
  // not begun, since another process may hold their core.
  struct Share {
    int n, owner, begin, end, left;  // left: owners not yet visited
    int size;
    bool is_own() const { return left == size; }
  };
  Share share(int member, int n) const {
    Share s{n, member, 0, 0, size_, size_};
    even_part(n, member, size_, &s.begin, &s.end);
    return s;
  }

  // Inside a job: the next piece, -1 when none is left.
  int claim(Share* s);

 private:
  struct Start {
    Pool* pool;
    int member;
  };
  static void* main(void* start);
  void loop(int member);

  int size_;
  void (*job_)(void*, int) = nullptr;
  void* ctx_ = nullptr;
  bool stop_ = false;
  pthread_t* threads_ = nullptr;
  Start* starts_ = nullptr;
  // Each on its own cache line: they are written by different members at different times.
  alignas(64) std::atomic<uint32_t> epoch_{0};     // one per run()
  alignas(64) std::atomic<uint32_t> sleepers_{0};  // members asleep on any of the words below
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};     // one per barrier
  alignas(64) std::atomic<int> work_{0};
  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };
  Counter* counters_ = nullptr;  // of claim(), one per member
  void reset_work();
};

}  // namespace naru
