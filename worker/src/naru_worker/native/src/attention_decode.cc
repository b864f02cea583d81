#include "attention_decode.h"

namespace naru {
namespace {

constexpr float kNever = -1e30f;
constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x <= 0, relative error below 3e-7; 0 below 2^-126 and for NaN.
NARU_INLINE V16 exp2_16(const V16& x) {
  V16 out;
  for (int i = 0; i < kParts; ++i) {
    const vf low = vset(-127.f), magic = vset(12582912.f);
    vf a = x.v[i];
    a = a > low ? a : low;  // NaN is not greater
    // Adding 1.5 * 2^23 rounds to an integer that also sits in the low mantissa bits, ready to become an exponent.
    const vf t = a + magic;
    const vf r = a - (t - magic);
    vf p = vset(1.326472712e-03f);
    p = p * r + vset(9.671512645e-03f);
    p = p * r + vset(5.550733743e-02f);
    p = p * r + vset(2.402224209e-01f);
    p = p * r + vset(6.931469776e-01f);
    p = p * r + vset(1.f);
    out.v[i] = (vf)((vi)p + ((vi)t << 23));
  }
  return out;
}

// The member's buffers.
struct Scratch {
  float* q;       // passes of [dim][rows]
  float* scores;  // [kPassRows][kRangeTokens]
  float* so_far;  // rows of a range
  float* range;   // rows of a range
  ByteQueries bytes;
};

Scratch carve(float* p, int rows, int padded) {
  Scratch s;
  s.q = p;
  s.scores = s.q + round_up(rows * padded, 16);
  s.so_far = s.scores + kPassRows * kRangeTokens;
  s.range = s.so_far + range_rows_floats(rows, padded);
  s.bytes.unit = s.range + range_rows_floats(rows, padded);
  s.bytes.shift = reinterpret_cast<int32_t*>(s.bytes.unit + rows);
  s.bytes.words = s.bytes.shift + rows;
  return s;
}

void load_queries(const Attention& job, const AttentionItem& item, int head, int rows, const Scratch& s) {
  const int dim = job.kv->head_dim, padded = job.kv->padded_dim;
  const float scale = job.scale * kLog2E;
  const float* from = job.q + static_cast<size_t>(item.token) * job.ldq + static_cast<size_t>(head) * rows * dim;
  if (job.kv->has_bytes()) {
    for (int r = 0; r < rows; ++r)
      for (int d = 0; d < padded; d += 16)
        store16(s.q + r * padded + d, load16n(from + r * dim + d, dim - d) * set16(scale));
    put_byte_queries(s.q, rows, padded, s.bytes);
    return;
  }
  for (int first = 0; first < rows; first += kPassRows) {
    const int count = pass_rows(rows, first);
    float* to = s.q + static_cast<size_t>(first) * dim;
    for (int r = 0; r < count; ++r)
      for (int d = 0; d < dim; ++d) to[d * count + r] = from[static_cast<size_t>(first + r) * dim + d] * scale;
  }
}

void run_range(const Attention& job, const AttentionItem& item, int head, int range, const NextRange& next,
               const Scratch& s, float* result) {
  const int position = item.position;
  const int begin = job.window > 0 && position + 1 > job.window ? position + 1 - job.window : 0;
  const int a = range * kRangeTokens, b = a + kRangeTokens;
  const RangeJob part{job.kv, job.layer, head, job.num_heads / job.kv->num_heads, item.blocks, a > begin ? a : begin,
                      b < position + 1 ? b : position + 1, next};
  if (job.kv->has_bytes())
    range_of_bytes(part, s.bytes, s.scores, result);
  else
    range_of_floats(part, s.q, s.scores, result);
}

void put_rows(const Attention& job, const AttentionItem& item, int head, int rows, float* result) {
  const int padded = job.kv->padded_dim;
  for (int r = 0; r < rows; ++r, result += range_row_floats(padded)) {
    // The sum is 0 only when every score was NaN or -inf: the row is then zero instead of NaN.
    const float sum = result[padded + 1];
    const V16 inverse = set16(sum > 0.f ? 1.f / sum : 0.f);
    for (int d = 0; d < padded; d += 16) store16(result + d, load16(result + d) * inverse);
    put_head(job, item.token, head * rows + r, result);
  }
}

int first_range(const Attention& job, int position) {
  return job.window > 0 && position + 1 > job.window ? (position + 1 - job.window) / kRangeTokens : 0;
}

// What follows range `range`, seen from there.
NextRange range_at(const AttentionItem& item, int head, int range, int from) {
  return NextRange{item.blocks, head, (range - from) * kRangeTokens, item.position + 1};
}

// The first range of what comes next.
NextRange first_of(const Attention& job, const AttentionItem* next, int next_head, int from) {
  if (next == nullptr) return NextRange{};
  const int range = next->num_splits > 1 ? next->split : first_range(job, next->position);
  return range_at(*next, next_head, range, from);
}

// All ranges, one after the other.
void run_alone(const Attention& job, const AttentionItem& item, int head, int rows, const AttentionItem* next,
               int next_head, const Scratch& s) {
  const int first = first_range(job, item.position), ranges = num_ranges(item.position);
  for (int i = first; i < ranges; ++i) {
    const NextRange follows = i + 1 < ranges ? range_at(item, head, i + 1, i) : first_of(job, next, next_head, i);
    run_range(job, item, head, i, follows, s, i == first ? s.so_far : s.range);
    if (i > first) fold_rows(rows, job.kv->padded_dim, s.range, s.so_far);
  }
  put_rows(job, item, head, rows, s.so_far);
}

// One range; the member that finishes the last one folds them all.
void run_shared(const Attention& job, const AttentionItem& item, int head, int rows, const AttentionItem* next,
                int next_head, const Scratch& s) {
  const int padded = job.kv->padded_dim, first = first_range(job, item.position);
  const size_t size = range_rows_floats(rows, padded);
  const size_t slot = static_cast<size_t>(item.partial + head * item.num_splits);
  float* parts = job.partials + slot * size;
  if (item.split >= first)
    run_range(job, item, head, item.split, first_of(job, next, next_head, item.split), s,
              parts + static_cast<size_t>(item.split) * size);
  std::atomic<int>* pending = job.pending + slot;
  if (pending->fetch_add(1, std::memory_order_acq_rel) + 1 < item.num_splits) return;
  pending->store(0, std::memory_order_relaxed);
  float* so_far = parts + static_cast<size_t>(first) * size;
  for (int i = first + 1; i < item.num_splits; ++i)
    fold_rows(rows, padded, parts + static_cast<size_t>(i) * size, so_far);
  put_rows(job, item, head, rows, so_far);
}

}  // namespace

void soften_row(float* scores, int count, int skip, int width, float* top, float* sum) {
  alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // Only the first and the last register can hold tokens that are not seen.
  const auto hide = [&](int c) {
    const V16 at = load16(kIndex) + set16(static_cast<float>(c));
    V16 x = load16(scores + c);
    for (int i = 0; i < kParts; ++i) {
      const vi seen = (vi)(at.v[i] >= vset(static_cast<float>(skip))) & (vi)(at.v[i] < vset(static_cast<float>(count)));
      x.v[i] = seen ? x.v[i] : vset(kNever);
    }
    store16(scores + c, x);
  };
  if (skip > 0) hide(0);
  if (count < width) hide(width - 16);
  V16 best = set16(kNever);
  for (int c = 0; c < width; c += 16) best = max16(load16(scores + c), best);  // NaN is not greater
  const float high = hmax16(best);
  const V16 shift = set16(high);
  V16 total = set16(0.f);
  for (int c = 0; c < width; c += 16) {
    const V16 p = exp2_16(load16(scores + c) - shift);
    store16(scores + c, p);
    total = total + p;
  }
  *top = high;
  *sum = hsum16(total);
}

// One copy of the code: where the compiler fuses a product and a sum must not depend on the caller.
__attribute__((noinline)) void fold_rows(int rows, int padded, const float* range, float* so_far) {
  const size_t stride = range_row_floats(padded);
  for (int first = 0; first < rows; first += kPassRows) {
    const int count = pass_rows(rows, first);
    alignas(64) float fade[16] = {};
    for (int r = 0; r < count; ++r) {
      float* a = so_far + static_cast<size_t>(first + r) * stride + padded;
      const float p = range[static_cast<size_t>(first + r) * stride + padded];
      const float top = p > a[0] ? p : a[0];
      fade[r] = a[0] - top;
      fade[8 + r] = p - top;
      a[0] = top;
    }
    store16(fade, exp2_16(load16(fade)));
    for (int r = 0; r < count; ++r) {
      const float* p = range + static_cast<size_t>(first + r) * stride;
      float* a = so_far + static_cast<size_t>(first + r) * stride;
      const V16 keep = set16(fade[r]), take = set16(fade[8 + r]);
      for (int d = 0; d < padded; d += 16) store16(a + d, fma16(load16(p + d), take, load16(a + d) * keep));
      a[padded + 1] = a[padded + 1] * fade[r] + p[padded + 1] * fade[8 + r];
    }
  }
}

size_t decode_scratch_floats(int group, int padded_dim) {
  return static_cast<size_t>(round_up(group * padded_dim, 16)) + kPassRows * kRangeTokens +
         2 * range_rows_floats(group, padded_dim) + static_cast<size_t>(group) * (padded_dim / 2 + 2) + 64;
}

void attend_generated(const Attention& job, const AttentionItem& item, int head, const AttentionItem* next, int next_head,
                      float* scratch) {
  const int rows = job.num_heads / job.kv->num_heads;
  const Scratch s = carve(scratch, rows, job.kv->padded_dim);
  load_queries(job, item, head, rows, s);
  if (item.num_splits > 1)
    run_shared(job, item, head, rows, next, next_head, s);
  else
    run_alone(job, item, head, rows, next, next_head, s);
}

}  // namespace naru
