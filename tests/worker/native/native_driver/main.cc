// Walks the kernels and the pool for the sanitizers: formats, head sizes, groups, block borders, numbers of rows, two
// models on one device, a load that fails under a step. Prints what was wrong; status 0 when nothing was.
#include <cmath>
#include <cstdio>
#include <thread>

#include "pool_storm.h"
#include "toy_model.h"

namespace {

bool g_ok = true;

void expect(bool ok, const char* what, const Shape& s, int count, int length) {
  if (ok) return;
  g_ok = false;
  fprintf(stderr, "%s: head size %d, %d x %d heads, cache of %d bytes, format %d, %d tokens of %d\n", what, s.head_dim,
          s.num_kv_heads, s.group, s.kv_element_bytes, s.weight_format, count, length);
}

bool finite(const std::vector<float>& x) {
  for (float v : x)
    if (!std::isfinite(v)) return false;
  return !x.empty();
}

// Steps at the borders of blocks and ranges, on one thread and on several: the same bits.
void walk(naru::Device* one, naru::Device* several, Shape shape, bool is_long = false) {
  shape.num_threads = 3;
  ToyModel a(one, shape, 7), b(several, shape, 7);
  const int steps[][2] = {{1, 1}, {15, 16}, {1, 17}, {16, 33}, {95, 128}, {1, 129}, {33, 162}, {350, 512}, {1, 513}};
  for (const auto& step : steps) {
    if (step[1] > 162 && !is_long) break;
    const bool generated = step[0] == 1;
    const std::vector<float> x = a.step(step[0], step[1], generated), y = b.step(step[0], step[1], generated);
    expect(finite(x), "not finite", shape, step[0], step[1]);
    expect(x == y, "threads change the result", shape, step[0], step[1]);
  }
}

void two_models_at_once(naru::Device* device) {
  const Shape shape{64, 2, 3, 2, naru::kW4M, 3};
  ToyModel a(device, shape, 1), b(device, shape, 2);
  const std::vector<float> x = a.step(40, 40, false), y = b.step(40, 40, false);
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) expect(b.step(40, 40, false) == y, "a neighbour changes the result", shape, 40, 40);
  });
  for (int i = 0; i < 20; ++i) expect(a.step(40, 40, false) == x, "a neighbour changes the result", shape, 40, 40);
  other.join();
}

void fails_under_steps(naru::Device* device) {
  const Shape shape{64, 2, 3, 2, naru::kW4M, 3};
  ToyModel model(device, shape, 3);
  std::thread loader([&] {
    model.native()->readiness().set(100);
    model.native()->readiness().fail();
  });
  for (int i = 0; i < 10; ++i) model.step(20, 20, false);
  loader.join();
}

}  // namespace

int main() {
  if (pool_storm() != 0) g_ok = false;
  naru::Device one(1), several(3);
  if (!one.reserve() || !several.reserve()) return 2;
  walk(&one, &several, Shape{64, 2, 3, 2, naru::kW4M, 3}, true);
  for (int dim : {32, 48, 64, 80, 96, 112, 128, 160, 192, 256})
    walk(&one, &several, Shape{dim, 2, dim % 3 + 1, 2, naru::kW4M, 3});
  for (int group = 1; group <= 8; ++group) walk(&one, &several, Shape{64, 1, group, group % 2 == 0 ? 4 : 2, naru::kW8, 3});
  for (int format = naru::kF32; format <= naru::kW6K; ++format) walk(&one, &several, Shape{64, 2, 2, 2, format, 3});
  two_models_at_once(&several);
  fails_under_steps(&several);
  puts(g_ok ? "kernels and pool: no fault" : "kernels and pool: FAULTS");
  return g_ok ? 0 : 1;
}
