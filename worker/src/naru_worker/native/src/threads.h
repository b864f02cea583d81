// A persistent pool whose members walk one job together, section by section. The caller is member 0.
//
// What a section waits for is that its pieces are done, not that all members came. A member that another process keeps
// off its core between two pieces is not missed: the others take the pieces, and when it is back it finds nothing left in
// the sections that have passed and joins the present one. Only a piece that it had begun is waited for, so pieces are
// small. Members spin for some tens of microseconds and then sleep on a futex, so that an idle engine costs nothing and
// the other processes of a two-core machine are not starved.
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

  // Runs job(ctx, member) on the members that are there in time, member 0 always, and returns when all that began have
  // ended. Every member goes through the same sections, for how they are cut does not depend on the member.
  void run(void (*job)(void*, int), void* ctx);

  // How long members look for the next section or job before they sleep, in cycles of the time stamp counter. Any thread.
  void spin_for(uint64_t cycles) { spin_cycles_.store(cycles, std::memory_order_relaxed); }

  // Wakes sleeping members ahead of a run() that comes within microseconds.
  void wake();

  // A member's way through the pieces of a section.
  struct Share {
    uint32_t section;
    int member, n, size;  // size: of parts
    int owner, begin, end, left;  // the part being visited; left: parts not exhausted yet
    bool is_own() const { return left == size; }
  };

  // Inside a job: begins a section of `n` pieces, at most one between two barriers. A member takes its even part in order
  // first, so that it can fetch ahead, then what others have not begun.
  Share share(int member, int n) { return begin_section(member, n, size_); }

  // The same, but pieces are taken in order by all: for pieces of unequal size, the largest first.
  Share queue(int member, int n) { return begin_section(member, n, 1); }

  // Inside a job: the next piece, -1 when none is left.
  int claim(Share* s);

  // Inside a job: ends the section, with all its pieces done; what they wrote may be read. Where the section was not cut
  // into pieces, it waits for all members.
  void barrier(int member);

 private:
  struct Start {
    Pool* pool;
    int member;
  };
  struct alignas(64) Member {
    uint32_t section = 0;
    int pieces = -1;  // of the section; -1: it was not cut
    int taken = 0;    // by this member
  };
  struct alignas(64) Part {
    std::atomic<uint64_t> taken{0};  // section << 32 | pieces taken; an older section stands for none
  };
  static void* main(void* start);
  void await_past(std::atomic<uint32_t>* word, uint32_t then, std::atomic<uint32_t>* sleepers);
  void loop(int member);
  bool enter(uint32_t* seen);
  void leave();
  void work(int member);
  Share begin_section(int member, int n, int size);

  int size_;
  std::atomic<uint64_t> spin_cycles_;
  void (*job_)(void*, int) = nullptr;
  void* ctx_ = nullptr;
  std::atomic<bool> stop_{false};
  pthread_t* threads_ = nullptr;
  Start* starts_ = nullptr;
  Member* members_ = nullptr;
  Part* parts_ = nullptr;  // one per member
  // Each on its own cache line: they are written by different members at different times.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // one per run()
  std::atomic<uint32_t> idle_{0};               // members asleep until the next
  alignas(64) std::atomic<uint64_t> gate_{0};   // epoch << 32 | whether it is open | members inside
  alignas(64) std::atomic<uint32_t> left_{0};   // changes when a member leaves a closed gate
  alignas(64) std::atomic<int> done_{0};        // pieces of the present section
  alignas(64) std::atomic<uint32_t> passed_{0};  // sections of the present job that are done
  std::atomic<uint32_t> waiting_{0};             // members asleep until passed_ or left_ changes
};

}  // namespace naru
