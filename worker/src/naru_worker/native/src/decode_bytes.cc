// A range of tokens whose keys and values are scaled bytes, for the rows of one kv head: products of integers.
//
// Queries and weights become integers of 16 bits, so that only the cache itself is coarse. The vector unit multiplies
// bytes: they go as two digits, value = 256 high + low, each a signed byte, in products of their own. Without such
// products bytes are widened, and the 16 bits go as they are. Sums are exact either way, hence in any order.
#include <algorithm>

#include "attention_decode.h"

namespace naru {
namespace {

constexpr int kMost = 32639;  // 127 * 256 + 127: the largest number of two digits
constexpr int kWeightWords = kRangeTokens / 2;  // of a row: two for each four tokens

// Sums of products for R rows and U registers. Two words for each four factors of a row.
#if defined(__AVX512VNNI__)
template <int R, int U>
struct Sums {
  __m512i high[R][U], low[R][U];
  NARU_INLINE void clear() {
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) high[r][u] = low[r][u] = _mm512_setzero_si512();
  }
  NARU_INLINE void add(int u, const uint8_t* quads, const int32_t* words) {
    const __m512i x = _mm512_loadu_si512(quads);
    for (int r = 0; r < R; ++r) {
      high[r][u] = _mm512_dpbusd_epi32(high[r][u], x, _mm512_set1_epi32(words[2 * r]));
      low[r][u] = _mm512_dpbusd_epi32(low[r][u], x, _mm512_set1_epi32(words[2 * r + 1]));
    }
  }
  NARU_INLINE vi total(int r, int u) const { return ((vi)high[r][u] << 8) + (vi)low[r][u]; }
};

// Four times four factors to words, `stride` apart.
NARU_INLINE void put_words(const V16& rounded, int32_t* words, int stride) {
  const __m512i x = _mm512_sub_epi32((__m512i)rounded.v[0], _mm512_set1_epi32(0x4B400000));
  const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24);
  alignas(16) int32_t h[4], l[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(h), _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_sub_epi32(x, low), 8)));
  _mm_store_si128(reinterpret_cast<__m128i*>(l), _mm512_cvtepi32_epi8(low));
  for (int i = 0; i < 4; ++i) {
    words[i * stride] = h[i];
    words[i * stride + 1] = l[i];
  }
}
#else
NARU_INLINE vi pairs(vi a, vi b) {
#if defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}

template <int R, int U>
struct Sums {
  vi sum[R][U];
  NARU_INLINE void clear() {
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < U; ++u) sum[r][u] = viset(0);
  }
  NARU_INLINE void add(int u, const uint8_t* quads, const int32_t* words) {
    const vi x = *reinterpret_cast<const viu*>(quads);
    const vi even = x & viset(0x00ff00ff);
    const vi odd = (x >> 8) & viset(0x00ff00ff);
    for (int r = 0; r < R; ++r)
      sum[r][u] = sum[r][u] + pairs(even, viset(words[2 * r])) + pairs(odd, viset(words[2 * r + 1]));
  }
  NARU_INLINE vi total(int r, int u) const { return sum[r][u]; }
};

// Four times four factors to words, `stride` apart: the first and third, the second and fourth.
NARU_INLINE void put_words(const V16& rounded, int32_t* words, int stride) {
  alignas(64) int32_t x[16];
  for (int i = 0; i < kParts; ++i)
    *reinterpret_cast<viu*>(x + i * kLanes) = (vi)rounded.v[i] - viset(0x4B400000);
  for (int i = 0; i < 4; ++i) {
    words[i * stride] = static_cast<int32_t>((x[4 * i] & 0xffff) | (static_cast<uint32_t>(x[4 * i + 2]) << 16));
    words[i * stride + 1] = static_cast<int32_t>((x[4 * i + 1] & 0xffff) | (static_cast<uint32_t>(x[4 * i + 3]) << 16));
  }
}
#endif

// Turns factors into words in units of the largest / kMost: count of them, a multiple of 16. Gives the unit; `sum` becomes
// 128 times their sum, which is what the 128 in each byte adds. No sum of products with 127 leaves 32 bits.
float to_words(const float* x, int count, int32_t* words, int rows, int32_t* sum) {
  V16 most = set16(0.f);
  for (int c = 0; c < count; c += 16) most = max16(abs16(load16(x + c)), most);
  const float high = hmax16(most), limit = static_cast<float>(std::min(kMost, (1 << 24) / count));
  const V16 inverse = set16(high > 0.f ? limit / high : 0.f), magic = set16(12582912.f);
  vi total = viset(0);
  for (int c = 0; c < count; c += 16) {
    const V16 rounded = fma16(load16(x + c), inverse, magic);
    for (int i = 0; i < kParts; ++i) total = total + ((vi)rounded.v[i] - viset(0x4B400000));
    put_words(rounded, words + c / 4 * 2 * rows, 2 * rows);
  }
  int32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all += total[i];
  *sum = all * 128;
  return high / limit;
}

// Registers at once: as few as keep the multipliers busy, and no more than fit.
constexpr int width(int rows) {
  if (kLanes == 16) return rows <= 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1;
  return rows <= 4 ? 2 : 1;
}

struct Pass {
  const RangeJob& job;
  int begin, end;  // whole panels of tokens around [from, to)
  const int32_t* words;  // of the queries or of the weights
  float* scores;
  float* result;
};

// Scores of U registers of tokens from c on.
template <int R, int U>
NARU_INLINE void score_units(const Pass& p, int c, const int32_t* shift, const float* unit) {
  const KVCache& kv = *p.job.kv;
  const int size = kv.block_size, quads = kv.padded_dim / 4;
  const uint8_t *keys[U], *ahead[U], *scales[U];
  for (int u = 0; u < U; ++u) {
    const int token = c + u * kLanes;
    const size_t block = static_cast<size_t>(p.job.blocks[token / size]) * kv.block_bytes();
    keys[u] = kv.keys(p.job.layer, p.job.head) + block + token % size * 4;
    ahead[u] = p.job.ahead(false, token, kv.padded_dim);
    scales[u] = kv.key_scales(p.job.layer, p.job.head) + block + token % size * sizeof(float);
  }
  Sums<R, U> sums;
  sums.clear();
  const size_t stride = static_cast<size_t>(size) * 4;
  for (int i = 0; i < quads; ++i)
    for (int u = 0; u < U; ++u) {
      if (i % (16 / kLanes) == 0) fetch_line(ahead[u] + i * kLanes * 4);
      sums.add(u, keys[u] + i * stride, p.words + i * 2 * R);
    }
  for (int u = 0; u < U; ++u) {
    const vf scale = vload(reinterpret_cast<const float*>(scales[u]));
    for (int r = 0; r < R; ++r)
      vstore(p.scores + r * kRangeTokens + (c - p.begin) + u * kLanes,
             vfloat(sums.total(r, u) - viset(shift[r])) * (scale * vset(unit[r])));
  }
}

template <int R>
void score_rows(const Pass& p, const int32_t* shift, const float* unit) {
  constexpr int U = width(R);
  int c = p.begin;
  for (; c + U * kLanes <= p.end; c += U * kLanes) score_units<R, U>(p, c, shift, unit);
  if constexpr (U > 2)
    for (; c + 2 * kLanes <= p.end; c += 2 * kLanes) score_units<R, 2>(p, c, shift, unit);
  if constexpr (U > 1)
    for (; c < p.end; c += kLanes) score_units<R, 1>(p, c, shift, unit);
}

// Weighted sums of U registers of dimensions.
template <int R, int U>
NARU_INLINE void mix_units(const Pass& p, int column, const int32_t* shift, const float* unit) {
  const KVCache& kv = *p.job.kv;
  const int size = kv.block_size, padded = kv.padded_dim;
  const uint8_t* values = kv.values(p.job.layer, p.job.head) + column * 4;
  const size_t block_bytes = kv.block_bytes(), stride = static_cast<size_t>(padded) * 4;
  Sums<R, U> sums;
  sums.clear();
  const int32_t* words = p.words;
  for (int c = p.begin; c < p.end; c += 16) {
    const uint8_t* v = values + static_cast<size_t>(p.job.blocks[c / size]) * block_bytes + c % size / 4 * stride;
    const uint8_t* ahead = p.job.ahead(true, c, padded) + column * 16;
    for (int i = 0; i < 4; ++i, v += stride, words += 2 * R, ahead += U * kLanes * 4)
      for (int u = 0; u < U; ++u) {
        if (u % (16 / kLanes) == 0) fetch_line(ahead + u * kLanes * 4);
        sums.add(u, v + u * kLanes * 4, words);
      }
  }
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < U; ++u)
      vstore(p.result + r * range_row_floats(padded) + column + u * kLanes,
             vfloat(sums.total(r, u) - viset(shift[r])) * vset(unit[r]));
}

template <int R>
void mix_rows(const Pass& p, const int32_t* shift, const float* unit) {
  constexpr int U = width(R);
  const int padded = p.job.kv->padded_dim;
  int d = 0;
  for (; d + U * kLanes <= padded; d += U * kLanes) mix_units<R, U>(p, d, shift, unit);
  if constexpr (U > 2)
    for (; d + 2 * kLanes <= padded; d += 2 * kLanes) mix_units<R, 2>(p, d, shift, unit);
  if constexpr (U > 1)
    for (; d < padded; d += kLanes) mix_units<R, 1>(p, d, shift, unit);
}

// Weights times their tokens' scales. A slot outside may hold anything: its weight is 0, and its product must be, too.
void scale_weights(const Pass& p, int rows) {
  const KVCache& kv = *p.job.kv;
  for (int c = p.begin; c < p.end; c += 16) {
    const size_t block = static_cast<size_t>(p.job.blocks[c / kv.block_size]) * kv.block_bytes();
    const uint8_t* at = kv.value_scales(p.job.layer, p.job.head) + block;
    const V16 scale = load16(reinterpret_cast<const float*>(at) + c % kv.block_size);
    for (int r = 0; r < rows; ++r) {
      float* w = p.scores + r * kRangeTokens + (c - p.begin);
      V16 x = load16(w);
      for (int i = 0; i < kParts; ++i) x.v[i] = x.v[i] > vset(0.f) ? x.v[i] * scale.v[i] : vset(0.f);
      store16(w, x);
    }
  }
}

template <int R>
void pass(const RangeJob& job, const ByteQueries& q, int first, float* scores, float* result) {
  const int padded = job.kv->padded_dim;
  alignas(64) int32_t words[R * kWeightWords];
  Pass p{job, job.from / kPanel * kPanel, round_up(job.to, kPanel), q.words + static_cast<size_t>(first) * padded / 2,
         scores, result};
  score_rows<R>(p, q.shift + first, q.unit + first);
  for (int r = 0; r < R; ++r) {
    float* known = result + r * range_row_floats(padded) + padded;
    soften_row(scores + r * kRangeTokens, job.to - p.begin, job.from - p.begin, p.end - p.begin, known, known + 1);
  }
  scale_weights(p, R);
  int32_t shift[R];
  float unit[R];
  for (int r = 0; r < R; ++r)
    unit[r] = to_words(scores + r * kRangeTokens, p.end - p.begin, words + 2 * r, R, shift + r);
  p.words = words;
  mix_rows<R>(p, shift, unit);
}

}  // namespace

void put_byte_queries(const float* q, int rows, int padded, const ByteQueries& to) {
  for (int first = 0; first < rows; first += kPassRows) {
    const int count = pass_rows(rows, first);
    int32_t* words = to.words + static_cast<size_t>(first) * padded / 2;
    for (int r = 0; r < count; ++r)
      to.unit[first + r] = to_words(q + static_cast<size_t>(first + r) * padded, padded, words + 2 * r, count,
                                    to.shift + first + r);
  }
}

void range_of_bytes(const RangeJob& job, const ByteQueries& q, float* scores, float* result) {
  using Run = void (*)(const RangeJob&, const ByteQueries&, int, float*, float*);
  static constexpr Run kPasses[kPassRows] = {pass<1>, pass<2>, pass<3>, pass<4>, pass<5>, pass<6>, pass<7>, pass<8>};
  for (int first = 0; first < job.rows; first += kPassRows)
    kPasses[pass_rows(job.rows, first) - 1](job, q, first, scores,
                                            result + range_rows_floats(first, job.kv->padded_dim));
}

}  // namespace naru
