// Attention of prompt tokens in floats: queries, keys, values, weights and sums.
#include "attention_prompt.h"
#include "prompt_softmax.h"
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

  void soften(const PromptUnit& u) {
    soften_span(&rows, u, scores[u.slot], [this, &u] { score(u); });
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
