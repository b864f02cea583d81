#include "threads.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

namespace naru {
namespace {

// About 5 and 40 us at 2.6 GHz. Waits that last longer than most let others have the core, in case it is one of them that
// is waited for; those that outlast any section of a decode step end asleep.
constexpr uint64_t kYieldCycles = 13000;
constexpr uint64_t kSpinCycles = 100000;

constexpr uint64_t kOpen = uint64_t{1} << 31;  // in the gate; below it the number of members inside

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

bool is_past(uint32_t now, uint32_t then) { return static_cast<int32_t>(now - then) > 0; }

// After a sequentially consistent change of the word.
void wake_sleepers(std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers) {
  if (sleepers->load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

}  // namespace

// Waits until the word is past `then`.
void Pool::await_past(std::atomic<uint32_t>* word, uint32_t then, std::atomic<uint32_t>* sleepers) {
  const uint64_t spin = spin_cycles_.load(std::memory_order_relaxed);
  uint64_t start = __rdtsc();
  for (;;) {
    const uint32_t now = word->load(std::memory_order_acquire);
    if (is_past(now, then)) return;
    _mm_pause();
    const uint64_t spent = __rdtsc() - start;
    if (spent < kYieldCycles && spent < spin) continue;
    if (spent < spin) {
      sched_yield();
      continue;
    }
    // The sleeper is counted before it looks again, and the waker changes the word before it looks at the count:
    // with sequentially consistent order one of the two sees the other.
    sleepers->fetch_add(1, std::memory_order_seq_cst);
    if (word->load(std::memory_order_seq_cst) == now) futex_wait(word, now);
    sleepers->fetch_sub(1, std::memory_order_seq_cst);
    start = __rdtsc();  // perhaps woken by wake(): work is about to come, spin again
  }
}

Pool::Pool(int num_threads) : size_(num_threads), spin_cycles_(kSpinCycles) {
  members_ = new Member[size_];
  parts_ = new Part[size_];
  threads_ = new pthread_t[size_];
  starts_ = new Start[size_];
  int made = 1;
  for (; made < size_; ++made) {
    starts_[made] = Start{this, made};
    if (pthread_create(&threads_[made], nullptr, &Pool::main, &starts_[made]) != 0) break;
  }
  // Fewer threads than asked for is slower, not wrong. No member has looked at size_ yet: the first job sets it free.
  size_ = made;
}

Pool::~Pool() {
  stop_.store(true);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(&epoch_, &idle_);
  for (int i = 1; i < size_; ++i) pthread_join(threads_[i], nullptr);
  delete[] threads_;
  delete[] starts_;
  delete[] parts_;
  delete[] members_;
}

void* Pool::main(void* start) {
  Start* s = static_cast<Start*>(start);
  s->pool->loop(s->member);
  return nullptr;
}

void Pool::loop(int member) {
  // Denormals cost a hundred cycles each and carry nothing here: flush them.
  _mm_setcsr(_mm_getcsr() | 0x8040);
  tiles_allow();
  uint32_t seen = 0;
  for (;;) {
    await_past(&epoch_, seen, &idle_);
    if (stop_.load()) return;
    if (!enter(&seen)) continue;
    work(member);
    leave();
  }
}

// Into the job that is going on, once, and never into one that has ended: what it worked on may be gone.
bool Pool::enter(uint32_t* seen) {
  uint64_t gate = gate_.load(std::memory_order_acquire);
  do {
    const uint32_t epoch = static_cast<uint32_t>(gate >> 32);
    const bool is_new = is_past(epoch, *seen);
    if (!is_new || (gate & kOpen) == 0) {
      if (is_new) *seen = epoch;
      return false;
    }
  } while (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  *seen = static_cast<uint32_t>(gate >> 32);
  return true;
}

void Pool::leave() {
  const uint64_t gate = gate_.fetch_sub(1, std::memory_order_acq_rel) - 1;
  if ((gate & kOpen) != 0) return;
  left_.fetch_add(1, std::memory_order_seq_cst);
  wake_sleepers(&left_, &waiting_);
}

void Pool::work(int member) {
  members_[member] = Member{};
  job_(ctx_, member);
}

void Pool::wake() {
  if (idle_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&epoch_);
}

void Pool::run(void (*job)(void*, int), void* ctx) {
  const unsigned csr = _mm_getcsr();
  _mm_setcsr(csr | 0x8040);
  // Nobody is inside: all may be set back.
  job_ = job;
  ctx_ = ctx;
  done_.store(0, std::memory_order_relaxed);
  passed_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < size_; ++i) parts_[i].taken.store(0, std::memory_order_relaxed);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  gate_.store(uint64_t{epoch} << 32 | kOpen, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_seq_cst);
  wake_sleepers(&epoch_, &idle_);
  work(0);
  uint32_t left = left_.load(std::memory_order_acquire);
  uint64_t gate = gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  while ((gate & (kOpen - 1)) != 0) {
    await_past(&left_, left, &waiting_);
    left = left_.load(std::memory_order_acquire);
    gate = gate_.load(std::memory_order_acquire);
  }
  // The caller's thread belongs to Python, whose floats must keep their denormals.
  _mm_setcsr(csr);
}

Pool::Share Pool::begin_section(int member, int n, int size) {
  Member& m = members_[member];
  m.pieces = n;
  Share s{m.section, member, n, size, size > 1 ? member : 0, 0, 0, size};
  even_part(n, s.owner, size, &s.begin, &s.end);
  if (is_past(passed_.load(std::memory_order_acquire), s.section)) s.left = 0;
  return s;
}

int Pool::claim(Share* s) {
  while (s->left > 0) {
    std::atomic<uint64_t>& word = parts_[s->owner].taken;
    uint64_t now = word.load(std::memory_order_relaxed);
    for (;;) {
      const uint32_t section = static_cast<uint32_t>(now >> 32);
      const int taken = section < s->section ? 0 : static_cast<int>(now & 0xffffffff);
      if (section > s->section || s->begin + taken >= s->end) break;
      const uint64_t next = uint64_t{s->section} << 32 | static_cast<uint32_t>(taken + 1);
      if (!word.compare_exchange_weak(now, next, std::memory_order_acq_rel, std::memory_order_relaxed)) continue;
      // While a piece of it is not done the section is not over. If it is, this member came too late to know how many
      // pieces it had, and what it took is none.
      if (is_past(passed_.load(std::memory_order_acquire), s->section)) {
        s->left = 0;
        return -1;
      }
      members_[s->member].taken += 1;
      return s->begin + taken;
    }
    s->left -= 1;
    s->owner = s->owner + 1 == s->size ? 0 : s->owner + 1;
    even_part(s->n, s->owner, s->size, &s->begin, &s->end);
  }
  return -1;
}

void Pool::barrier(int member) {
  Member& m = members_[member];
  const uint32_t section = m.section++;
  const bool is_cut = m.pieces >= 0;
  const int pieces = is_cut ? m.pieces : size_, taken = is_cut ? m.taken : 1;
  m.pieces = -1;
  m.taken = 0;
  if (pieces == 0) return;
  if (taken > 0 && done_.fetch_add(taken, std::memory_order_acq_rel) + taken == pieces) {
    done_.store(0, std::memory_order_relaxed);
    passed_.store(section + 1, std::memory_order_seq_cst);
    wake_sleepers(&passed_, &waiting_);
    return;
  }
  await_past(&passed_, section, &waiting_);
}

}  // namespace naru
