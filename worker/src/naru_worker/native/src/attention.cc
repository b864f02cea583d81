#include "attention.h"

#include <algorithm>
#include <cmath>

#include "attention_prompt.h"
#include "tiles.h"

namespace naru {
namespace {

constexpr int kSpan = 64;      // tokens scored between two looks at the running maximum
constexpr float kNever = -1e30f;

// The member's buffers for one tile.
struct Tile {
  int rows;
  int dim;
  int padded;
  float* q;       // [rows][dim], scaled
  float* scores;  // [rows][kSpan]
  float* acc;     // [rows][padded]
  float* top;     // [rows] running maximum
  float* sum;     // [rows] running sum of exponentials
  int* begin;     // [rows] visible tokens [begin, end)
  int* end;
  float* so_far;  // [group][padded + 2] of a generated token: the ranges folded so far
  float* range;   // the same, of the newest range
};

Tile make_tile(float* scratch, int max_rows, int dim, int padded) {
  Tile t{};
  t.dim = dim;
  t.padded = padded;
  t.q = scratch;
  t.scores = t.q + static_cast<size_t>(max_rows) * padded;
  t.acc = t.scores + static_cast<size_t>(max_rows) * kSpan;
  t.top = t.acc + static_cast<size_t>(max_rows) * padded;
  t.sum = t.top + max_rows;
  t.begin = reinterpret_cast<int*>(t.sum + max_rows);
  t.end = t.begin + max_rows;
  t.so_far = reinterpret_cast<float*>(t.end + max_rows);
  t.range = t.so_far + static_cast<size_t>(max_rows) * (padded + 2);
  return t;
}

template <typename T, int R>
NARU_INLINE void score_rows(const float* q, int ldq, const T* keys, int dim, int stride, float* scores) {
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = set16(0.f);
  for (int d = 0; d < dim; ++d) {
    const V16 key = load16(keys + static_cast<size_t>(d) * stride);
    for (int r = 0; r < R; ++r) acc[r] = fma16(key, set16(q[r * ldq + d]), acc[r]);
  }
  for (int r = 0; r < R; ++r) store16(scores + r * kSpan, acc[r]);
}

// Scores of sixteen tokens for all rows.
template <typename T>
void score_block(const Tile& t, const T* keys, int stride, float* scores) {
  int r = 0;
  for (; r + 8 <= t.rows; r += 8) score_rows<T, 8>(t.q + r * t.dim, t.dim, keys, t.dim, stride, scores + r * kSpan);
  for (; r + 3 <= t.rows; r += 3) score_rows<T, 3>(t.q + r * t.dim, t.dim, keys, t.dim, stride, scores + r * kSpan);
  for (; r < t.rows; ++r) score_rows<T, 1>(t.q + r * t.dim, t.dim, keys, t.dim, stride, scores + r * kSpan);
}

// Turns the scores of tokens [from, to) into weights; what a row may not see, NaN included, becomes 0.
void soften(const Tile& t, int from, int to) {
  alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const V16 index = load16(kIndex);
  const int width = (to - from + 15) / 16 * 16;
  for (int r = 0; r < t.rows; ++r) {
    float* s = t.scores + r * kSpan;
    const vf lo = vset(static_cast<float>(t.begin[r] - from)), hi = vset(static_cast<float>(t.end[r] - from));
    V16 best = set16(kNever);
    for (int c = 0; c < width; c += 16) {
      V16 x = load16(s + c);
      const V16 at = index + set16(static_cast<float>(c));
      for (int i = 0; i < kParts; ++i) {
        const vi seen = (vi)(at.v[i] >= lo) & (vi)(at.v[i] < hi);
        x.v[i] = seen ? x.v[i] : vset(kNever);
      }
      store16(s + c, x);
      best = max16(x, best);
    }
    const float was = t.top[r];
    const float now = hmax16(best) > was ? hmax16(best) : was;
    const V16 top = set16(now);
    V16 sum = set16(0.f);
    for (int c = 0; c < width; c += 16) {
      const V16 x = load16(s + c);
      V16 p = exp16(x - top);
      for (int i = 0; i < kParts; ++i) p.v[i] = x.v[i] > vset(kNever) ? p.v[i] : vset(0.f);
      store16(s + c, p);
      sum = sum + p;
    }
    const float fade = was == now ? 1.f : std::exp(was - now);
    t.top[r] = now;
    t.sum[r] = t.sum[r] * fade + hsum16(sum);
    if (fade != 1.f) {
      const V16 f = set16(fade);
      float* acc = t.acc + static_cast<size_t>(r) * t.padded;
      for (int d = 0; d < t.padded; d += 16) store16(acc + d, load16(acc + d) * f);
    }
  }
}

template <typename T, int R, int D>
NARU_INLINE void mix_rows(const T* values, int padded, const float* weights, int from, int to, float* acc) {
  V16 a[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) a[r][d] = load16(acc + static_cast<size_t>(r) * padded + d * 16);
  for (int c = from; c < to; ++c) {
    V16 v[D];
    for (int d = 0; d < D; ++d) v[d] = load16(values + static_cast<size_t>(c) * padded + d * 16);
    for (int r = 0; r < R; ++r) {
      const V16 w = set16(weights[r * kSpan + c]);
      for (int d = 0; d < D; ++d) a[r][d] = fma16(v[d], w, a[r][d]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) store16(acc + static_cast<size_t>(r) * padded + d * 16, a[r][d]);
}

template <typename T, int D>
void mix_columns(const Tile& t, const T* values, const float* weights, int from, int to, int column) {
  int r = 0;
  float* acc = t.acc + column;
  for (; r + 4 <= t.rows; r += 4)
    mix_rows<T, 4, D>(values + column, t.padded, weights + r * kSpan, from, to, acc + static_cast<size_t>(r) * t.padded);
  for (; r + 3 <= t.rows; r += 3)
    mix_rows<T, 3, D>(values + column, t.padded, weights + r * kSpan, from, to, acc + static_cast<size_t>(r) * t.padded);
  for (; r < t.rows; ++r)
    mix_rows<T, 1, D>(values + column, t.padded, weights + r * kSpan, from, to, acc + static_cast<size_t>(r) * t.padded);
}

// Adds the values of tokens [from, to) of one 16-token block, weighted. Slots outside are not read: they may hold NaN.
template <typename T>
void mix_block(const Tile& t, const T* values, const float* weights, int from, int to) {
  int d = 0;
#if defined(__AVX512F__)
  for (; d + 64 <= t.padded; d += 64) mix_columns<T, 4>(t, values, weights, from, to, d);
#endif
  for (; d < t.padded; d += 16) mix_columns<T, 1>(t, values, weights, from, to, d);
}

// Asks for `bytes` at p. A block's keys and values are short runs far from the next block's: the hardware cannot guess.
NARU_INLINE void fetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(p) + i, _MM_HINT_T0);
}

// Attends all rows of the tile to tokens [from, to).
template <typename T>
void walk(const Tile& t, const KVCache& kv, int layer, int head, const int32_t* blocks, int from, int to) {
  const uint8_t* keys = kv.keys(layer, head);
  const uint8_t* values = kv.values(layer, head);
  const size_t stride = kv.block_bytes();
  const int size = kv.block_size;
  // From a multiple of the span, whatever the tile's first row sees: a row's sums must not depend on its tile.
  for (int start = from / kSpan * kSpan; start < to; start += kSpan) {
    const int stop = start + kSpan < to ? start + kSpan : to;
    for (int c = start; c < stop; c += 16) {
      const T* k = reinterpret_cast<const T*>(keys + static_cast<size_t>(blocks[c / size]) * stride) + c % size;
      if (c % size == 0) {
        const size_t part = t.dim * size * sizeof(T);
        fetch(values + static_cast<size_t>(blocks[c / size]) * stride, part);
        if (c + 2 * size < to) fetch(keys + static_cast<size_t>(blocks[c / size + 2]) * stride, part);
      }
      score_block<T>(t, k, size, t.scores + (c - start));
    }
    soften(t, start, stop);
    for (int c = start; c < stop; c += 16) {
      const T* v = reinterpret_cast<const T*>(values + static_cast<size_t>(blocks[c / size]) * stride) +
                   static_cast<size_t>(c % size) * kv.padded_dim;
      mix_block<T>(t, v, t.scores + (c - start), from > c ? from - c : 0, stop - c < 16 ? stop - c : 16);
    }
  }
}

void walk_any(const Tile& t, const Attention& job, int head, const int32_t* blocks, int from, int to) {
  if (job.kv->element_bytes == 2)
    walk<f16>(t, *job.kv, job.layer, head, blocks, from, to);
  else
    walk<float>(t, *job.kv, job.layer, head, blocks, from, to);
}

void load_queries(const Attention& job, const AttentionItem& item, int head, Tile* t) {
  const int group = job.num_heads / job.kv->num_heads;
  const V16 scale = set16(job.scale);
  t->rows = item.num_tokens * group;
  for (int i = 0; i < item.num_tokens; ++i) {
    const float* row = job.q + static_cast<size_t>(item.token + i) * job.ldq + static_cast<size_t>(head) * group * t->dim;
    float* to = t->q + static_cast<size_t>(i) * group * t->dim;
    const int count = group * t->dim;
    for (int c = 0; c < count; c += 16) store16n(to + c, load16n(row + c, count - c) * scale, count - c);
    const int position = item.position + i;
    for (int g = 0; g < group; ++g) {
      const int r = i * group + g;
      t->end[r] = position + 1;
      t->begin[r] = job.window > 0 && position + 1 > job.window ? position + 1 - job.window : 0;
      t->top[r] = kNever;
      t->sum[r] = 0.f;
    }
  }
  memset(t->acc, 0, static_cast<size_t>(t->rows) * t->padded * sizeof(float));
}

void put_row(const Tile& t, const float* acc, float sum, float* out) {
  // sum is 0 only when every score was NaN or -inf: the row is then zero instead of NaN.
  const V16 inverse = set16(sum > 0.f ? 1.f / sum : 0.f);
  for (int d = 0; d < t.dim; d += 16) store16n(out + d, load16(acc + d) * inverse, t.dim - d);
}

float* output_row(const Attention& job, const AttentionItem& item, int head, int r) {
  const int group = job.num_heads / job.kv->num_heads;
  return job.out + static_cast<size_t>(item.token + r / group) * job.ldo +
         static_cast<size_t>(head * group + r % group) * job.kv->head_dim;
}

size_t partial_stride(const Tile& t) { return static_cast<size_t>(t.padded) + 2; }

// Adds the result over one range to the result so far, row by row: acc, top, sum as in a tile. One copy of the code: where
// the compiler fuses a product and a sum must not depend on the caller.
__attribute__((noinline)) void fold(int rows, int padded, const float* range, size_t stride, float* so_far) {
  for (int r = 0; r < rows; ++r) {
    const float* p = range + static_cast<size_t>(r) * stride;
    float* a = so_far + static_cast<size_t>(r) * stride;
    const float top = p[padded] > a[padded] ? p[padded] : a[padded];
    const float keep = std::exp(a[padded] - top), take = std::exp(p[padded] - top);
    for (int d = 0; d < padded; d += 16)
      store16(a + d, fma16(load16(p + d), set16(take), load16(a + d) * set16(keep)));
    a[padded] = top;
    a[padded + 1] = a[padded + 1] * keep + p[padded + 1] * take;
  }
}

// Attends the rows of a generated token to one range, [from, to) of what they see.
void run_range(const Attention& job, const AttentionItem& item, int head, int range, Tile* t) {
  load_queries(job, item, head, t);
  const int a = range * kRangeTokens, b = a + kRangeTokens;
  const int from = a > t->begin[0] ? a : t->begin[0], to = b < t->end[0] ? b : t->end[0];
  if (from < to) walk_any(*t, job, head, item.blocks, from, to);
}

void save_rows(const Tile& t, float* to) {
  const size_t stride = partial_stride(t);
  for (int r = 0; r < t.rows; ++r, to += stride) {
    memcpy(to, t.acc + static_cast<size_t>(r) * t.padded, static_cast<size_t>(t.padded) * sizeof(float));
    to[t.padded] = t.top[r];
    to[t.padded + 1] = t.sum[r];
  }
}

void put_folded(const Attention& job, const AttentionItem& item, int head, const Tile& t, const float* rows) {
  const size_t stride = partial_stride(t);
  for (int r = 0; r < t.rows; ++r)
    put_row(t, rows + r * stride, rows[r * stride + t.padded + 1], output_row(job, item, head, r));
}

// All ranges of a generated token, one after the other.
void run_generated(const Attention& job, const AttentionItem& item, int head, Tile* t) {
  const size_t stride = partial_stride(*t);
  const int ranges = num_ranges(item.position);
  for (int i = 0; i < ranges; ++i) {
    run_range(job, item, head, i, t);
    save_rows(*t, i == 0 ? t->so_far : t->range);
    if (i > 0) fold(t->rows, t->padded, t->range, stride, t->so_far);
  }
  put_folded(job, item, head, *t, t->so_far);
}

// One range of a generated token; the member that finishes the last one folds them all.
void run_shared(const Attention& job, const AttentionItem& item, int head, Tile* t) {
  run_range(job, item, head, item.split, t);
  const size_t stride = partial_stride(*t), size = static_cast<size_t>(t->rows) * stride;
  const size_t first = static_cast<size_t>(item.partial + head * item.num_splits);
  float* parts = job.partials + first * size;
  save_rows(*t, parts + static_cast<size_t>(item.split) * size);
  std::atomic<int>* pending = job.pending + first;
  if (pending->fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_splits) return;
  pending->store(0, std::memory_order_relaxed);
  for (int i = 1; i < item.num_splits; ++i) fold(t->rows, t->padded, parts + static_cast<size_t>(i) * size, stride, parts);
  put_folded(job, item, head, *t, parts);
}

void run_item(const Attention& job, const AttentionItem& item, int head, Tile* t) {
  if (item.num_splits > 1) return run_shared(job, item, head, t);
  run_generated(job, item, head, t);
}

}  // namespace

size_t attention_scratch_floats(int group, int padded_dim) {
  const size_t rows = static_cast<size_t>(group);
  const size_t generated = rows * (4 * static_cast<size_t>(padded_dim) + kSpan + 8) + 64;
  return std::max(generated, prompt_scratch_floats(group, padded_dim));
}

void attention(const Attention& job, const AttentionPlan& plan, Pool* pool, int member, float* scratch) {
  const int heads = job.kv->num_heads;
  Pool::Share share = pool->queue(member, plan.num_items * heads);
  Tile t = make_tile(scratch, job.num_heads / heads, job.kv->head_dim, job.kv->padded_dim);
#if defined(__AMX_TILE__)
  bool tiled = false;
#endif
  for (int i = pool->claim(&share); i >= 0; i = pool->claim(&share)) {
    const AttentionItem& item = plan.items[i / heads];
    if (item.generated) {
      run_item(job, item, i % heads, &t);
      continue;
    }
#if defined(__AMX_TILE__)
    if (!tiled) float_tile_shapes();
    tiled = true;
#endif
    attend_prompt(job, item, i % heads, scratch);
  }
#if defined(__AMX_TILE__)
  if (tiled) release_tiles();
#endif
}

}  // namespace naru
