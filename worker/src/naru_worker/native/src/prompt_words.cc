// Attention of prompt tokens in integers of 16 bits: queries, keys, values and weights; sums of products in 32 bits, of spans
// in float. All that is rounded has a scale of its own: a query's row, a token's key, a token's value, a row's weights over a
// span. So a row's numbers depend on what it sees alone, and the error is that of the cache's halves.
//
// No sum of products overflows: keys and queries have a length of kLength at most, whose product bounds that of any two
// vectors, and the weights of a row add up to kLength, each times a value below 2^15.
#include "attention_prompt.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

#include "prompt_softmax.h"
#include "prompt_walk.h"

namespace naru {
namespace {

constexpr float kLength = 32000.f;
constexpr float kMostValue = 32767.f;
constexpr size_t kStageBytes = 128 << 10;

NARU_INLINE __m256i round8(vf x) { return _mm256_cvtps_epi32((__m256)x); }

// (even, odd) of eight lanes; a number that is not one gives any.
NARU_INLINE __m256i pair_up(vf even, vf odd) {
  return _mm256_blend_epi16(round8(even), _mm256_slli_epi32(round8(odd), 16), 0xaa);
}

// Sixteen lanes in 16 bits.
NARU_INLINE __m256i narrow(const V16& x) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(round8(x.v[0]), round8(x.v[1])), 0xd8);
}

// Adds the products of a row's pair with sixteen columns.
NARU_INLINE void add_products(const int16_t* at, __m256i lo, __m256i hi, __m256i* a, __m256i* b) {
  int32_t pair;
  memcpy(&pair, at, 4);
  const __m256i both = _mm256_set1_epi32(pair);
  *a = _mm256_add_epi32(*a, _mm256_madd_epi16(lo, both));
  *b = _mm256_add_epi32(*b, _mm256_madd_epi16(hi, both));
  // The compiler would copy sums to other registers and back.
  asm("" : "+x"(*a), "+x"(*b));
}

// put(r, part, sums) for each of kBlockRows rows of a and both halves of sixteen columns of b. `pairs` pairs of a row lie one
// after the other; a pair's columns lie `ldb` after those of the pair before.
template <class Put>
NARU_INLINE void multiply_words(const int16_t* a, size_t lda, const int16_t* b, size_t ldb, int pairs, Put put) {
  for (int r = 0; r < kBlockRows; r += 4, a += 4 * lda) {
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
    const int16_t* columns = b;
    for (int i = 0; i < 2 * pairs; i += 2, columns += ldb) {
      const __m256i lo = _mm256_load_si256(reinterpret_cast<const __m256i*>(columns));
      const __m256i hi = _mm256_load_si256(reinterpret_cast<const __m256i*>(columns + 16));
      add_products(a + i, lo, hi, &a0, &a1);
      add_products(a + lda + i, lo, hi, &b0, &b1);
      add_products(a + 2 * lda + i, lo, hi, &c0, &c1);
      add_products(a + 3 * lda + i, lo, hi, &d0, &d1);
    }
    put(r, (vi)a0, (vi)a1);
    put(r + 1, (vi)b0, (vi)b1);
    put(r + 2, (vi)c0, (vi)c1);
    put(r + 3, (vi)d0, (vi)d1);
  }
}

struct Words {
  PromptRows rows;
  int width;       // of a query, whole registers
  int16_t* q;      // [row][width]
  float* q_scale;  // [row], with the softmax's
  int16_t* k;      // [span][width / 2][kSpan][2]
  float* k_scale;  // [span][kSpan]
  int16_t* v;      // [span][kSpan / 2][padded][2]
  float* v_scale;  // [span][kSpan]
  float* scores;   // [kBlockRows][kSpan]; then the weights
  int16_t* weights;     // [kBlockRows][kSpan]
  float* weight_scale;  // [kBlockRows]
  int spans;

  size_t carve(float* scratch, int max_rows, int head_dim, int padded_dim) {
    Carver from(scratch);
    rows.carve(&from, max_rows, head_dim, padded_dim);
    width = round_up(head_dim, 16);
    const size_t r = static_cast<size_t>(round_up(max_rows, kBlockRows));
    const size_t keys = static_cast<size_t>(width) * kSpan, values = static_cast<size_t>(padded_dim) * kSpan;
    spans = std::max<int>(1, kStageBytes / ((keys + values) * sizeof(int16_t)));
    q = from.take<int16_t>(r * width);
    q_scale = from.take<float>(r);
    k = from.take<int16_t>(spans * keys);
    k_scale = from.take<float>(static_cast<size_t>(spans) * kSpan);
    v = from.take<int16_t>(spans * values);
    v_scale = from.take<float>(static_cast<size_t>(spans) * kSpan);
    scores = from.take<float>(kBlockRows * kSpan);
    weights = from.take<int16_t>(kBlockRows * kSpan);
    weight_scale = from.take<float>(kBlockRows);
    return from.floats();
  }

  int stage_spans() const { return spans; }

  void load_query(const float* from, float scale, int r) {
    V16 squares = set16(0.f);
    for (int d = 0; d < rows.dim; d += 16) {
      const V16 x = load16n(from + d, rows.dim - d);
      squares = fma16(x, x, squares);
    }
    const float length = std::sqrt(hsum16(squares));
    const V16 inverse = set16(length > 0.f ? kLength / length : 0.f);
    int16_t* to = q + static_cast<size_t>(r) * width;
    for (int d = 0; d < width; d += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + d),
                         narrow(load16n(from + d, rows.dim > d ? rows.dim - d : 0) * inverse));
    q_scale[r] = scale * (length / kLength);
  }

  void load_queries(const Attention& job, const AttentionItem& item, int head) {
    const int group = job.num_heads / job.kv->num_heads;
    for (int i = 0, r = 0; i < item.num_tokens; ++i) {
      const float* from = job.q + static_cast<size_t>(item.token + i) * job.ldq + static_cast<size_t>(head) * group * rows.dim;
      for (int g = 0; g < group; ++g, ++r, from += rows.dim) load_query(from, job.scale * kLog2E, r);
    }
    const size_t left = static_cast<size_t>(rows.blocks) * kBlockRows - rows.rows;
    memset(q + static_cast<size_t>(rows.rows) * width, 0, left * width * sizeof(int16_t));
    memset(q_scale + rows.rows, 0, left * sizeof(float));
  }

  // What lies in unused slots stays in its own column of the scores, which nobody may see.
  template <class Reader>
  void unpack_keys(const Reader& keys, int index, int column) {
    V16 squares = set16(0.f);
    for (int d = 0; d < rows.dim; ++d) {
      const V16 x = keys.row(d);
      squares = fma16(x, x, squares);
    }
    V16 inverse, scale;
    for (int i = 0; i < kParts; ++i) {
      const vf length = (vf)_mm256_sqrt_ps((__m256)squares.v[i]);
      inverse.v[i] = length > vset(0.f) ? vset(kLength) / length : vset(0.f);
      scale.v[i] = length * vset(1.f / kLength);
    }
    store16(k_scale + index * kSpan + column, scale);
    int16_t* to = k + static_cast<size_t>(index) * width * kSpan + column * 2;
    for (int d = 0; d < width; d += 2, to += kSpan * 2) {
      const V16 even = d < rows.dim ? keys.row(d) * inverse : set16(0.f);
      const V16 odd = d + 1 < rows.dim ? keys.row(d + 1) * inverse : set16(0.f);
      for (int i = 0; i < kParts; ++i)
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + i * 16), pair_up(even.v[i], odd.v[i]));
    }
  }

  // The factor that a token's values are rounded with.
  template <class Reader>
  NARU_INLINE float value_inverse(const Reader& values, int token, float* scale) const {
    V16 most = set16(0.f);
    for (int d = 0; d < rows.padded; d += 16) most = max16(abs16(values.part(token, d)), most);
    const float high = hmax16(most);
    *scale = high * (1.f / kMostValue);
    return high > 0.f ? kMostValue / high : 0.f;
  }

  template <class Reader>
  void unpack_values(const Reader& values, int index, int column, int from, int to) {
    int16_t* out = v + (static_cast<size_t>(index) * kSpan + column) * rows.padded;
    float* scales = v_scale + index * kSpan + column;
    for (int c = 0; c < 16; c += 2, out += rows.padded * 2) {
      const bool has_even = c >= from && c < to, has_odd = c + 1 >= from && c + 1 < to;
      scales[c] = scales[c + 1] = 0.f;
      const V16 even = set16(has_even ? value_inverse(values, c, scales + c) : 0.f);
      const V16 odd = set16(has_odd ? value_inverse(values, c + 1, scales + c + 1) : 0.f);
      for (int d = 0; d < rows.padded; d += 16) {
        const V16 a = has_even ? values.part(c, d) * even : set16(0.f);
        const V16 b = has_odd ? values.part(c + 1, d) * odd : set16(0.f);
        for (int i = 0; i < kParts; ++i)
          _mm256_store_si256(reinterpret_cast<__m256i*>(out + d * 2 + i * 16), pair_up(a.v[i], b.v[i]));
      }
    }
  }

  void clear_values(int, int) {}

  void score(const PromptUnit& u) {
    const int first = u.block * kBlockRows;
    for (int c = 0; c < u.columns * 16; c += 16) {
      const V16 scale = load16(k_scale + u.index * kSpan + c);
      float* to = scores + c;
      multiply_words(q + static_cast<size_t>(first) * width, width,
                     k + static_cast<size_t>(u.index) * width * kSpan + c * 2, kSpan * 2, width / 2,
                     [&](int r, vi lo, vi hi) {
                       const V16 sums{{vfloat(lo), vfloat(hi)}};
                       store16(to + r * kSpan, sums * scale * set16(q_scale[first + r]));
                     });
    }
  }

  // A row's weights times the scales of the values, to integers.
  void round_weights(const PromptUnit& u, int r) {
    float* s = scores + r * kSpan;
    const float* scale = v_scale + u.index * kSpan;
    V16 total = set16(0.f);
    for (int c = 0; c < u.columns * 16; c += 16) {
      const V16 w = load16(s + c) * load16(scale + c);
      store16(s + c, w);
      total = total + w;
    }
    const float sum = hsum16(total);
    const V16 inverse = set16(sum > 0.f ? kLength / sum : 0.f);
    weight_scale[r] = sum * (1.f / kLength);
    for (int c = 0; c < u.columns * 16; c += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(weights + r * kSpan + c), narrow(load16(s + c) * inverse));
  }

  void mix(const PromptUnit& u) {
    for (int d = 0; d < rows.padded; d += 16) {
      float* acc = rows.acc + static_cast<size_t>(u.block) * kBlockRows * rows.padded + d;
      multiply_words(weights, kSpan, v + static_cast<size_t>(u.index) * kSpan * rows.padded + d * 2,
                     static_cast<size_t>(rows.padded) * 2, u.columns * 8, [&](int r, vi lo, vi hi) {
                       float* to = acc + static_cast<size_t>(r) * rows.padded;
                       const V16 sums{{vfloat(lo), vfloat(hi)}};
                       store16(to, fma16(sums, set16(weight_scale[r]), load16(to)));
                     });
    }
  }

  void advance(const PromptUnit&, const PromptUnit& now, const PromptUnit& next) {
    if (now.block >= 0) {
      soften_span(&rows, now, scores, [this, &now] { score(now); });
      for (int r = 0; r < kBlockRows; ++r) round_weights(now, r);
      mix(now);
    }
    if (next.block >= 0) score(next);
  }
};

}  // namespace

size_t prompt_words_scratch(int max_rows, int padded_dim) {
  Words kernel;
  return kernel.carve(nullptr, max_rows, padded_dim, padded_dim);
}

void attend_prompt_words(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch) {
  Words kernel;
  kernel.carve(scratch, max_rows, job.kv->head_dim, job.kv->padded_dim);
  with_kv_format(*job.kv, [&](auto* element) {
    walk_prompt<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(&kernel, job, item, head);
  });
}

}  // namespace naru

#endif
