// A range of tokens whose keys and values are halves or floats, for the rows of one kv head.
//
// Scores of many tokens are summed at once, so that the sums of one do not wait for each other; the weighted sums of
// values stay in registers for the whole range. A sum's order is that of its dimensions or tokens: it depends on nothing
// but the range.
#include "attention_decode.h"

namespace naru {
namespace {

// Scores of U registers of tokens for R rows. Meanwhile asks for `dim` * kLanes elements at each of `ahead`.
template <typename T, int R, int U>
NARU_INLINE void score_units(const float* q, const T* const* keys, const uint8_t* const* ahead, int dim, int stride,
                             float* scores) {
  constexpr int kEvery = 64 / (kLanes * static_cast<int>(sizeof(T))) > 0 ? 64 / (kLanes * static_cast<int>(sizeof(T))) : 1;
  vf acc[R][U];
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < U; ++u) acc[r][u] = vset(0.f);
  for (int d = 0; d < dim; ++d) {
    const size_t at = static_cast<size_t>(d) * stride;
    if (d % kEvery == 0)
      for (int u = 0; u < U; ++u) fetch_line(ahead[u] + d * kLanes * sizeof(T));
    if constexpr (R < U) {
      vf w[R];
      for (int r = 0; r < R; ++r) w[r] = vset(q[d * R + r]);
      for (int u = 0; u < U; ++u) {
        const vf key = vload(keys[u] + at);
        for (int r = 0; r < R; ++r) acc[r][u] = key * w[r] + acc[r][u];
      }
    } else {
      vf key[U];
      for (int u = 0; u < U; ++u) key[u] = vload(keys[u] + at);
      for (int r = 0; r < R; ++r) {
        const vf w = vset(q[d * R + r]);
        for (int u = 0; u < U; ++u) acc[r][u] = key[u] * w + acc[r][u];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int u = 0; u < U; ++u) vstore(scores + r * kRangeTokens + u * kLanes, acc[r][u]);
}

// Registers of tokens at once: enough sums to hide the latency of each, as few as fit.
constexpr int score_width(int rows) {
  if (kLanes == 16) return rows <= 4 ? 4 : rows <= 6 ? 3 : 2;
  return rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
}

template <typename T, int R>
void score_rows(const RangeJob& job, const float* q, int begin, int end, float* scores) {
  constexpr int U = score_width(R);
  const KVCache& kv = *job.kv;
  const uint8_t* base = kv.keys(job.layer, job.head);
  const size_t block_bytes = kv.block_bytes();
  const int size = kv.block_size, dim = kv.head_dim;
  for (int c = begin; c < end; c += U * kLanes) {
    const T* keys[U];
    const uint8_t* ahead[U];
    const int units = (end - c) / kLanes < U ? (end - c) / kLanes : U;
    for (int u = 0; u < units; ++u) {
      const int token = c + u * kLanes;
      const size_t block = static_cast<size_t>(job.blocks[token / size]) * block_bytes;
      keys[u] = reinterpret_cast<const T*>(base + block) + token % size;
      ahead[u] = job.ahead(false, token, dim * sizeof(T));
    }
    float* to = scores + (c - begin);
    if (units == U) {
      score_units<T, R, U>(q, keys, ahead, dim, size, to);
      continue;
    }
    if constexpr (U > 3)
      if (units == 3) score_units<T, R, 3>(q, keys, ahead, dim, size, to);
    if constexpr (U > 2)
      if (units == 2) score_units<T, R, 2>(q, keys, ahead, dim, size, to);
    if constexpr (U > 1)
      if (units == 1) score_units<T, R, 1>(q, keys, ahead, dim, size, to);
  }
}

// Weighted sums of D registers of dimensions over tokens [from, to) for R rows. Slots outside are not read: they may hold
// NaN.
template <typename T, int R, int D>
void mix_columns(const RangeJob& job, const float* weights, int begin, int column, float* result) {
  const KVCache& kv = *job.kv;
  const uint8_t* base = kv.values(job.layer, job.head);
  const size_t block_bytes = kv.block_bytes(), stride = range_row_floats(kv.padded_dim);
  const int size = kv.block_size, padded = kv.padded_dim;
  vf acc[R][D];
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) acc[r][d] = vset(0.f);
  for (int c = job.from; c < job.to;) {
    const int in_block = c % size;
    const int stop = c - in_block + size < job.to ? c - in_block + size : job.to;
    const T* v = reinterpret_cast<const T*>(base + static_cast<size_t>(job.blocks[c / size]) * block_bytes) +
                 static_cast<size_t>(in_block) * padded + column;
    const float* w = weights + (c - begin);
    const uint8_t* ahead = job.ahead(true, c, padded * sizeof(T)) + column * sizeof(T);
    for (; c < stop; ++c, ++w, v += padded, ahead += padded * sizeof(T)) {
      for (size_t i = 0; i < D * kLanes * sizeof(T); i += 64) fetch_line(ahead + i);
      if constexpr (R < D) {
        vf x[R];
        for (int r = 0; r < R; ++r) x[r] = vset(w[r * kRangeTokens]);
        for (int d = 0; d < D; ++d) {
          const vf value = vload(v + d * kLanes);
          for (int r = 0; r < R; ++r) acc[r][d] = value * x[r] + acc[r][d];
        }
      } else {
        vf value[D];
        for (int d = 0; d < D; ++d) value[d] = vload(v + d * kLanes);
        for (int r = 0; r < R; ++r) {
          const vf x = vset(w[r * kRangeTokens]);
          for (int d = 0; d < D; ++d) acc[r][d] = value[d] * x + acc[r][d];
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D; ++d) vstore(result + r * stride + column + d * kLanes, acc[r][d]);
}

constexpr int mix_width(int rows) {
  if (kLanes == 16) return rows <= 6 ? 4 : 2;
  return rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
}

template <typename T, int R>
void mix_rows(const RangeJob& job, const float* weights, int begin, float* result) {
  constexpr int D = mix_width(R);
  const int padded = job.kv->padded_dim;
  int d = 0;
  for (; d + D * kLanes <= padded; d += D * kLanes) mix_columns<T, R, D>(job, weights, begin, d, result);
  if constexpr (D > 2)
    for (; d + 2 * kLanes <= padded; d += 2 * kLanes) mix_columns<T, R, 2>(job, weights, begin, d, result);
  if constexpr (D > 1)
    for (; d < padded; d += kLanes) mix_columns<T, R, 1>(job, weights, begin, d, result);
}

template <typename T, int R>
void pass(const RangeJob& job, const float* q, float* scores, float* result) {
  const int padded = job.kv->padded_dim;
  const size_t stride = range_row_floats(padded);
  const int begin = job.from / kPanel * kPanel, end = round_up(job.to, kPanel);
  score_rows<T, R>(job, q, begin, end, scores);
  for (int r = 0; r < R; ++r)
    soften_row(scores + r * kRangeTokens, job.to - begin, job.from - begin, end - begin, result + r * stride + padded,
               result + r * stride + padded + 1);
  mix_rows<T, R>(job, scores, begin, result);
}

template <typename T>
void all_passes(const RangeJob& job, const float* q, float* scores, float* result) {
  using Pass = void (*)(const RangeJob&, const float*, float*, float*);
  static constexpr Pass kPasses[kPassRows] = {pass<T, 1>, pass<T, 2>, pass<T, 3>, pass<T, 4>,
                                              pass<T, 5>, pass<T, 6>, pass<T, 7>, pass<T, 8>};
  for (int first = 0; first < job.rows; first += kPassRows)
    kPasses[pass_rows(job.rows, first) - 1](job, q + static_cast<size_t>(first) * job.kv->head_dim, scores,
                                            result + range_rows_floats(first, job.kv->padded_dim));
}

}  // namespace

void range_of_floats(const RangeJob& job, const float* q, float* scores, float* result) {
  if (job.kv->element_bytes == 2)
    all_passes<f16>(job, q, scores, result);
  else
    all_passes<float>(job, q, scores, result);
}

}  // namespace naru
