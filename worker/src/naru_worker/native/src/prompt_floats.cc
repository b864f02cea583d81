// Attention of prompt tokens in floats: queries, keys, values, weights and sums.
#include "attention_prompt.h"
#include "prompt_walk.h"

namespace naru {
namespace {

// Rows and sixteen-lane columns of a product that fill the registers: with fewer the sums wait for each other, with more
// they go to memory.
#if defined(__AVX512F__)
constexpr int kColumns = 4;
constexpr int rows_at_once(int columns) { return 16 / columns; }
#elif defined(__AVX2__)
constexpr int kColumns = 1;
constexpr int rows_at_once(int) { return 6; }
#else
constexpr int kColumns = 1;
constexpr int rows_at_once(int) { return 3; }
#endif

constexpr size_t kStageBytes = 128 << 10;

// 2^x within 2e-7; x above -126, or the result is as small as that.
NARU_INLINE vf exp2_float(vf x) {
#if defined(__AVX512F__)
  const vf r = (vf)_mm512_reduce_ps((__m512)x, 0);  // x - round(x)
#else
  const vf lo = vset(-126.f), hi = vset(126.f);
  x = x > lo ? x : lo;
  x = x < hi ? x : hi;
  const vf t = x + vset(12582912.f);  // 1.5 * 2^23: the rounded x sits in the low mantissa bits
  const vf r = x - (t - vset(12582912.f));
#endif
  vf p = vset(0.00132647267f);
  p = p * r + vset(0.00967151268f);
  p = p * r + vset(0.0555073375f);
  p = p * r + vset(0.240222421f);
  p = p * r + vset(0.693146978f);
  p = p * r + vset(1.f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, _mm512_sub_ps((__m512)x, (__m512)r));
#else
  return (vf)((vi)p + ((vi)t << 23));
#endif
}

// c[r][.] (+)= sum over i of a[r * lda + i] * b[i * ldb + .], in order of i.
template <int R, int C>
NARU_INLINE void multiply_part(const float* a, int lda, const float* b, size_t ldb, int count, float* c, size_t ldc,
                               bool add) {
  V16 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) sum[r][j] = add ? load16(c + r * ldc + j * 16) : set16(0.f);
  for (int i = 0; i < count; ++i) {
    V16 x[C];
    for (int j = 0; j < C; ++j) x[j] = load16(b + i * ldb + j * 16);
    for (int r = 0; r < R; ++r) {
      const V16 w = set16(a[r * lda + i]);
      for (int j = 0; j < C; ++j) sum[r][j] = fma16(x[j], w, sum[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) store16(c + r * ldc + j * 16, sum[r][j]);
}

template <int C>
void multiply_rows(const float* a, int lda, const float* b, size_t ldb, int count, float* c, size_t ldc, bool add) {
  constexpr int R = rows_at_once(C), kRest = kBlockRows % R;
  int r = 0;
  for (; r + R <= kBlockRows; r += R) multiply_part<R, C>(a + r * lda, lda, b, ldb, count, c + r * ldc, ldc, add);
  if constexpr (kRest > 0) multiply_part<kRest, C>(a + r * lda, lda, b, ldb, count, c + r * ldc, ldc, add);
}

// Sixteen rows of a times b, for `lanes16` columns of sixteen.
void multiply(const float* a, int lda, const float* b, size_t ldb, int count, float* c, size_t ldc, int lanes16, bool add) {
  int j = 0;
  if constexpr (kColumns == 4) {
    for (; j + 4 <= lanes16; j += 4) multiply_rows<4>(a, lda, b + j * 16, ldb, count, c + j * 16, ldc, add);
    for (; j + 2 <= lanes16; j += 2) multiply_rows<2>(a, lda, b + j * 16, ldb, count, c + j * 16, ldc, add);
  }
  for (; j < lanes16; ++j) multiply_rows<1>(a, lda, b + j * 16, ldb, count, c + j * 16, ldc, add);
}

struct Floats {
  PromptRows rows;
  float* q;  // [row][dim], scaled
  float* k;  // [span][dim][kSpan]
  float* v;  // [span][kSpan][padded]
  float* scores[2];  // [kBlockRows][kSpan], by slot; then the weights
  int spans;

  size_t carve(float* scratch, int max_rows, int head_dim, int padded_dim) {
    Carver from(scratch);
    rows.carve(&from, max_rows, head_dim, padded_dim);
    const size_t d = static_cast<size_t>(padded_dim);
    spans = std::max<int>(1, kStageBytes / (2 * d * kSpan * sizeof(float)));
    q = from.take<float>(static_cast<size_t>(round_up(max_rows, kBlockRows)) * d);
    k = from.take<float>(spans * d * kSpan);
    v = from.take<float>(spans * d * kSpan);
    for (float*& s : scores) s = from.take<float>(kBlockRows * kSpan);
    return from.floats();
  }

  int stage_spans() const { return spans; }

  void load_queries(const Attention& job, const AttentionItem& item, int head) {
    const int count = job.num_heads / job.kv->num_heads * rows.dim;
    const V16 scale = set16(job.scale * kLog2E);
    for (int i = 0; i < item.num_tokens; ++i) {
      const float* from = job.q + static_cast<size_t>(item.token + i) * job.ldq + static_cast<size_t>(head) * count;
      float* to = q + static_cast<size_t>(i) * count;
      for (int c = 0; c < count; c += 16) store16n(to + c, load16n(from + c, count - c) * scale, count - c);
    }
    const size_t real = static_cast<size_t>(rows.rows) * rows.dim;
    memset(q + real, 0, (static_cast<size_t>(rows.blocks) * kBlockRows * rows.dim - real) * sizeof(float));
  }

  template <class Reader>
  void unpack_keys(const Reader& keys, int index, int column) {
    float* to = k + static_cast<size_t>(index) * rows.padded * kSpan + column;
    for (int d = 0; d < rows.dim; ++d) store16(to + d * kSpan, keys.row(d));
  }

  template <class Reader>
  void unpack_values(const Reader& values, int index, int column, int from, int to) {
    float* out = v + (static_cast<size_t>(index) * kSpan + column) * rows.padded;
    for (int c = 0; c < 16; ++c, out += rows.padded)
      for (int d = 0; d < rows.padded; d += 16)
        store16(out + d, c >= from && c < to ? values.part(c, d) : set16(0.f));
  }

  void clear_values(int, int) {}

  void score(const PromptUnit& u) {
    multiply(q + static_cast<size_t>(u.block) * kBlockRows * rows.dim, rows.dim,
             k + static_cast<size_t>(u.index) * rows.padded * kSpan, kSpan, rows.dim, scores[u.slot], kSpan, u.columns, false);
  }

  // Scores of a span that all rows see to weights, in place. False: some row's top has to move first; the rows' state is
  // then as before, but the scores are gone.
  template <bool kShift>
  bool soften_all(int block, float* s) {
    V16 high = set16(0.f);
    for (int r = 0; r < kBlockRows; ++r, s += kSpan) {
      V16 sum = load16(rows.sums + (block * kBlockRows + r) * 16);
      const V16 top = set16(rows.top[block * kBlockRows + r]);
      for (int c = 0; c < kSpan; c += 16) {
        V16 x = load16(s + c);
        if (kShift) x = x - top;
        for (int i = 0; i < kParts; ++i) x.v[i] = exp2_float(x.v[i]);
        store16(s + c, x);
        sum = sum + x;
      }
      store16(rows.next + r * 16, sum);
      high = max16(sum, high);
    }
    if (hmax16(high) >= kGrownSum) return false;
    rows.commit_sums(block);
    return true;
  }

  void soften_row(int r, int span, int columns, float* s) {
    alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf lo = vset(static_cast<float>(rows.begin[r] - span)), hi = vset(static_cast<float>(rows.end[r] - span));
    V16 best = set16(kNever);
    for (int c = 0; c < columns * 16; c += 16) {
      V16 x = load16(s + c);
      const V16 at = load16(kIndex) + set16(static_cast<float>(c));
      for (int i = 0; i < kParts; ++i) {
        const vi seen = (vi)(at.v[i] >= lo) & (vi)(at.v[i] < hi);
        x.v[i] = seen ? x.v[i] : vset(kNever);
      }
      store16(s + c, x);
      best = max16(x, best);
    }
    const float high = hmax16(best);
    const V16 top = set16(high > kNever ? rows.raise_top(r, high) : 0.f);
    V16 sum = load16(rows.sums + r * 16);
    for (int c = 0; c < columns * 16; c += 16) {
      const V16 x = load16(s + c);
      V16 p = x - top;
      for (int i = 0; i < kParts; ++i) p.v[i] = x.v[i] > vset(kNever) ? exp2_float(p.v[i]) : vset(0.f);
      store16(s + c, p);
      sum = sum + p;
    }
    store16(rows.sums + r * 16, sum);
  }

  void soften(const PromptUnit& u) {
    float* s = scores[u.slot];
    if (rows.state[u.block] != kFresh && rows.sees_all(u.block, u.span)) {
      if (rows.state[u.block] == kLevel ? soften_all<false>(u.block, s) : soften_all<true>(u.block, s)) return;
      score(u);
    }
    for (int r = 0; r < kBlockRows; ++r) soften_row(u.block * kBlockRows + r, u.span, u.columns, s + r * kSpan);
    rows.update_state(u.block);
  }

  void mix(const PromptUnit& u) {
    multiply(scores[u.slot], kSpan, v + static_cast<size_t>(u.index) * kSpan * rows.padded, rows.padded, u.columns * 16,
             rows.acc + static_cast<size_t>(u.block) * kBlockRows * rows.padded, rows.padded, rows.padded / 16, true);
  }

  // All of it is the vector unit's work: nothing to overlap, and weights are mixed while they are near.
  void advance(const PromptUnit&, const PromptUnit& now, const PromptUnit& next) {
    if (now.block >= 0) {
      soften(now);
      mix(now);
    }
    if (next.block >= 0) score(next);
  }
};

}  // namespace

size_t prompt_floats_scratch(int max_rows, int padded_dim) {
  Floats kernel;
  return kernel.carve(nullptr, max_rows, padded_dim, padded_dim);
}

void attend_prompt_floats(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch) {
  Floats kernel;
  kernel.carve(scratch, max_rows, job.kv->head_dim, job.kv->padded_dim);
  with_kv_format(*job.kv, [&](auto* element) {
    walk_prompt<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(&kernel, job, item, head);
  });
}

}  // namespace naru
