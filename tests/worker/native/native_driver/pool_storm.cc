// Jobs of random sections on pools of several sizes: each piece is done once, and what it wrote is there when its section
// is over. Under ThreadSanitizer a wrong order of memory shows as a race on `cells`.
#include "pool_storm.h"

#include <cstdio>
#include <vector>

#include "threads.h"

namespace {

struct Job {
  naru::Pool* pool;
  uint32_t seed;
  int sections;
  std::vector<int> cells;  // written by the pieces of one section, read by those of the next
  std::atomic<int> faults{0};
};

uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  return x * 0x846ca68bu;
}

int pieces_of(const Job& job, int section) {
  return static_cast<int>(mix(job.seed + static_cast<uint32_t>(section)) % job.cells.size());
}

void walk(void* ctx, int member) {
  Job& job = *static_cast<Job*>(ctx);
  for (int i = 0; i < job.sections; ++i) {
    const int n = pieces_of(job, i), before = i == 0 ? 0 : pieces_of(job, i - 1);
    naru::Pool::Share share = i % 2 == 0 ? job.pool->share(member, n) : job.pool->queue(member, n);
    for (int p = job.pool->claim(&share); p >= 0; p = job.pool->claim(&share)) {
      // A cell counts the sections in a row that wrote it.
      const int other = before == 0 ? p : (p + 1) % before;
      if (i > 0 && other < before && job.cells[static_cast<size_t>(other)] < 0) job.faults.fetch_add(1);
    }
    job.pool->barrier(member);
    naru::Pool::Share writes = job.pool->share(member, n);
    for (int p = job.pool->claim(&writes); p >= 0; p = job.pool->claim(&writes)) job.cells[static_cast<size_t>(p)] += 1;
    job.pool->barrier(member);
  }
}

}  // namespace

int pool_storm() {
  int faults = 0;
  for (int size : {1, 2, 3, 5}) {
    naru::Pool pool(size);
    for (uint32_t seed = 0; seed < 150; ++seed) {
      if (seed == 100) pool.spin_for(0);
      Job job{&pool, seed * 977, 20, std::vector<int>(40, 0)};
      pool.run(walk, &job);
      int expected = 0, found = 0;
      for (int i = 0; i < job.sections; ++i) expected += pieces_of(job, i);
      for (int cell : job.cells) found += cell;
      if (expected != found) ++faults;
      faults += job.faults.load();
      if (seed % 10 == 0) pool.wake();
    }
  }
  if (faults != 0) fprintf(stderr, "pool: %d faults\n", faults);
  return faults;
}
