#include "threads.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiles.h"

namespace naru {
namespace {

// About 40 us at 2.6 GHz: longer than a barrier of a decode step, shorter than a scheduler tick.
constexpr uint64_t kSpinCycles = 100000;

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}

// Waits until *word != old.
void await_change(std::atomic<uint32_t>* word, uint32_t old, std::atomic<uint32_t>* sleepers) {
  uint64_t start = __rdtsc();
  while (word->load(std::memory_order_acquire) == old) {
    _mm_pause();
    if (__rdtsc() - start < kSpinCycles) continue;
    // The sleeper is counted before it looks again, and the waker changes the word before it looks at the count:
    // with sequentially consistent order one of the two sees the other.
    sleepers->fetch_add(1, std::memory_order_seq_cst);
    if (word->load(std::memory_order_seq_cst) == old) futex_wait(word, old);
    sleepers->fetch_sub(1, std::memory_order_seq_cst);
    start = __rdtsc();  // woken early by wake(): work is about to come, spin again
  }
}

void change(std::atomic<uint32_t>* word, std::atomic<uint32_t>* sleepers) {
  word->fetch_add(1, std::memory_order_seq_cst);
  if (sleepers->load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

}  // namespace

Pool::Pool(int num_threads) : size_(num_threads) {
  counters_ = new Counter[size_];
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
  stop_ = true;
  change(&epoch_, &sleepers_);
  for (int i = 1; i < size_; ++i) pthread_join(threads_[i], nullptr);
  delete[] threads_;
  delete[] starts_;
  delete[] counters_;
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
    await_change(&epoch_, seen, &sleepers_);
    ++seen;
    if (stop_) return;
    job_(ctx_, member);
    barrier();
  }
}

void Pool::wake() {
  if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake_all(&epoch_);
}

void Pool::run(void (*job)(void*, int), void* ctx) {
  const unsigned csr = _mm_getcsr();
  _mm_setcsr(csr | 0x8040);
  job_ = job;
  ctx_ = ctx;
  if (size_ > 1) change(&epoch_, &sleepers_);
  job(ctx, 0);
  barrier();
  // The caller's thread belongs to Python, whose floats must keep their denormals.
  _mm_setcsr(csr);
}

int Pool::claim(Share* s) {
  while (s->left > 0) {
    const int piece = s->begin + counters_[s->owner].taken.fetch_add(1, std::memory_order_relaxed);
    if (piece < s->end) return piece;
    s->left -= 1;
    s->owner = s->owner + 1 == size_ ? 0 : s->owner + 1;
    even_part(s->n, s->owner, size_, &s->begin, &s->end);
  }
  return -1;
}

void Pool::reset_work() {
  work_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < size_; ++i) counters_[i].taken.store(0, std::memory_order_relaxed);
}

void Pool::barrier() {
  if (size_ == 1) {
    reset_work();
    return;
  }
  const uint32_t old = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    arrived_.store(0, std::memory_order_relaxed);
    reset_work();
    change(&phase_, &sleepers_);
  } else {
    await_change(&phase_, old, &sleepers_);
  }
}

}  // namespace naru
