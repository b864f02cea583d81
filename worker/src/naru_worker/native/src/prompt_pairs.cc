// Attention of prompt tokens in pairs of bf16: queries, keys, values and weights; sums in float. On AMX tiles, or with dot
// products of pairs in the vector unit. Source: the order of operands in a tile is that of Intel's TDPBF16PS.
#include "attention_prompt.h"

#if defined(__AVX512BF16__)

#include "pairs.h"
#include "prompt_walk.h"

namespace naru {
namespace {

constexpr int kTile = 512;        // elements of a tile: 16 rows of 32, or 16 pairs of 16 columns
constexpr int kSpanTiles = kSpan / 16;
constexpr int kSpanSteps = kSpan / 32;
constexpr size_t kStageBytes = 128 << 10;

NARU_INLINE __m512 vec(const V16& a) { return (__m512)a.v[0]; }

// (even, odd) of sixteen lanes.
NARU_INLINE __m512i pair_up(__m512 even, __m512 odd) {
  alignas(64) static const uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// x to 2^x within 1e-4: what follows is rounded to eight bits. Step by step over all registers: their chains are long, and
// the scheduler does not see far enough to find the next one.
template <int N>
NARU_INLINE void exp2_rough(__m512* x) {
  __m512 r[N], p[N];
  for (int i = 0; i < N; ++i) r[i] = _mm512_reduce_ps(x[i], 1);  // x - floor(x)
  for (int i = 0; i < N; ++i)
    p[i] = _mm512_fmadd_ps(_mm512_set1_ps(0.077067049f), r[i], _mm512_set1_ps(0.227644979f));
  for (int i = 0; i < N; ++i) p[i] = _mm512_fmadd_ps(p[i], r[i], _mm512_set1_ps(0.695116791f));
  for (int i = 0; i < N; ++i) p[i] = _mm512_fmadd_ps(p[i], r[i], _mm512_set1_ps(1.0f));
  for (int i = 0; i < N; ++i) x[i] = _mm512_scalef_ps(p[i], x[i]);  // by the floor of x
}

#if defined(__AMX_TILE__)

// c (16 x 64 floats) = a (16 x 32 * steps) times b, tile (step, column) at b + (step * kSpanTiles + column) * kTile.
template <int C>
NARU_INLINE void score_tiles(const uint16_t* a, const uint16_t* b, int steps, float* c) {
  _tile_zero(0);
  if constexpr (C > 1) _tile_zero(1);
  if constexpr (C > 2) _tile_zero(2);
  if constexpr (C > 3) _tile_zero(3);
  for (int s = 0; s < steps; ++s, a += kTile, b += kSpanTiles * kTile) {
    _tile_loadd(4, a, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) {
      _tile_loadd(6, b + kTile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(7, b + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (C > 3) {
      _tile_loadd(5, b + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, kSpan * 4);
  if constexpr (C > 1) _tile_stored(1, c + 16, kSpan * 4);
  if constexpr (C > 2) _tile_stored(2, c + 32, kSpan * 4);
  if constexpr (C > 3) _tile_stored(3, c + 48, kSpan * 4);
}

NARU_INLINE void score_block(const uint16_t* a, const uint16_t* b, int steps, int columns, float* c) {
  if (columns == 4) return score_tiles<4>(a, b, steps, c);
  if (columns == 3) return score_tiles<3>(a, b, steps, c);
  if (columns == 2) return score_tiles<2>(a, b, steps, c);
  score_tiles<1>(a, b, steps, c);
}

// c (16 x 16 * C floats) += a (16 x 32 * steps) times b, tile (step, column) at b + step * ldb + column * kTile.
template <int C>
NARU_INLINE void mix_tiles(const uint16_t* a, const uint16_t* b, size_t ldb, int steps, float* c, int stride) {
  _tile_loadd(0, c, stride);
  if constexpr (C > 1) _tile_loadd(1, c + 16, stride);
  if constexpr (C > 2) {
    _tile_loadd(2, c + 32, stride);
    _tile_loadd(3, c + 48, stride);
  }
  for (int s = 0; s < steps; ++s, a += kTile, b += ldb) {
    _tile_loadd(4, a, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (C > 1) {
      _tile_loadd(6, b + kTile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (C > 2) {
      _tile_loadd(7, b + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (C > 2) {
      _tile_loadd(5, b + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, stride);
  if constexpr (C > 1) _tile_stored(1, c + 16, stride);
  if constexpr (C > 2) {
    _tile_stored(2, c + 32, stride);
    _tile_stored(3, c + 48, stride);
  }
}

#else

// c[r][.] (+)= a's rows [0, R) times C tiles of b, by pairs; both as for tiles.
template <int R, int C>
NARU_INLINE void pair_part(const uint16_t* a, const uint16_t* b, size_t ldb, int steps, float* c, size_t ldc, bool add) {
  __m512 sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) sum[r][j] = add ? _mm512_loadu_ps(c + r * ldc + j * 16) : _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, a += kTile, b += ldb) {
    for (int i = 0; i < 32; i += 2) {
      __m512bh x[C];
      for (int j = 0; j < C; ++j) x[j] = (__m512bh)_mm512_load_si512(b + j * kTile + i * 16);
      for (int r = 0; r < R; ++r) {
        int32_t pair;
        memcpy(&pair, a + r * 32 + i, 4);
        const __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
        for (int j = 0; j < C; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], x[j], w);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) _mm512_storeu_ps(c + r * ldc + j * 16, sum[r][j]);
}

template <int C>
void pair_rows(const uint16_t* a, const uint16_t* b, size_t ldb, int steps, float* c, size_t ldc, bool add) {
  constexpr int R = 16 / C;
  for (int r = 0; r < 16; r += R) pair_part<R, C>(a + r * 32, b, ldb, steps, c + r * ldc, ldc, add);
}

void score_block(const uint16_t* a, const uint16_t* b, int steps, int columns, float* c) {
  int j = 0;
  for (; j + 4 <= columns; j += 4) pair_rows<4>(a, b + j * kTile, kSpanTiles * kTile, steps, c + j * 16, kSpan, false);
  for (; j + 2 <= columns; j += 2) pair_rows<2>(a, b + j * kTile, kSpanTiles * kTile, steps, c + j * 16, kSpan, false);
  for (; j < columns; ++j) pair_rows<1>(a, b + j * kTile, kSpanTiles * kTile, steps, c + j * 16, kSpan, false);
}

template <int C>
NARU_INLINE void mix_tiles(const uint16_t* a, const uint16_t* b, size_t ldb, int steps, float* c, int stride) {
  pair_rows<C>(a, b, ldb, steps, c, stride / 4, true);
}

#endif

struct Pairs {
  PromptRows rows;
  int steps;    // of 32 dimensions
  int tiles;    // of 16 values
  uint16_t* q;  // [block][step] tiles
  uint16_t* k;  // [span][step][kSpanTiles]
  uint16_t* v;  // [span][kSpanSteps][tiles]
  float* scores[2];      // [kBlockRows][kSpan], by slot
  uint16_t* weights[2];  // [kSpanSteps] tiles
  int spans;

  size_t carve(float* scratch, int max_rows, int head_dim, int padded_dim) {
    Carver from(scratch);
    rows.carve(&from, max_rows, head_dim, padded_dim);
    steps = round_up(head_dim, 32) / 32;
    tiles = padded_dim / 16;
    spans = std::max<int>(1, kStageBytes / ((steps * kSpanTiles + kSpanSteps * tiles) * kTile * 2));
    q = from.take<uint16_t>(static_cast<size_t>(round_up(max_rows, kBlockRows)) * steps * 32);
    k = from.take<uint16_t>(static_cast<size_t>(spans) * steps * kSpanTiles * kTile);
    v = from.take<uint16_t>(static_cast<size_t>(spans) * kSpanSteps * tiles * kTile);
    for (float*& s : scores) s = from.take<float>(kBlockRows * kSpan);
    for (uint16_t*& w : weights) w = from.take<uint16_t>(kSpanSteps * kTile);
    return from.floats();
  }

  int stage_spans() const { return spans; }

  void load_queries(const Attention& job, const AttentionItem& item, int head) {
    const int group = job.num_heads / job.kv->num_heads, dim = rows.dim;
    const V16 scale = set16(job.scale * kLog2E);
    memset(q, 0, static_cast<size_t>(rows.blocks) * steps * kTile * 2);
    for (int i = 0, r = 0; i < item.num_tokens; ++i) {
      const float* from = job.q + static_cast<size_t>(item.token + i) * job.ldq + static_cast<size_t>(head) * group * dim;
      for (int g = 0; g < group; ++g, ++r, from += dim) {
        uint16_t* to = q + static_cast<size_t>(r / 16) * steps * kTile + r % 16 * 32;
        for (int d = 0; d < dim; d += 16)
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d / 32 * kTile + d % 32),
                              (__m256i)_mm512_cvtneps_pbh(vec(load16n(from + d, dim - d) * scale)));
      }
    }
  }

  // What lies in unused slots stays in its own column of the scores, which nobody may see.
  template <class Reader>
  void unpack_keys(const Reader& keys, int index, int column) {
    uint16_t* to = k + (static_cast<size_t>(index) * steps * kSpanTiles + column / 16) * kTile;
    const __m512 zero = _mm512_setzero_ps();
    for (int d = 0; d < steps * 32; d += 2) {
      const __m512 even = d < rows.dim ? vec(keys.row(d)) : zero, odd = d + 1 < rows.dim ? vec(keys.row(d + 1)) : zero;
      _mm512_store_si512(to + d / 32 * kSpanTiles * kTile + d % 32 * 16, pair_up(even, odd));
    }
  }

  uint16_t* values_at(int index, int column) const {
    return v + (static_cast<size_t>(index) * kSpanSteps + column / 32) * tiles * kTile + column % 32 * 16;
  }

  template <class Reader>
  void unpack_values(const Reader& values, int index, int column, int from, int to) {
    uint16_t* out = values_at(index, column);
    const __m512 zero = _mm512_setzero_ps();
    if (from == 0 && to == 16) {
      for (int c = 0; c < 16; c += 2)
        for (int n = 0; n < tiles; ++n)
          _mm512_store_si512(out + n * kTile + c * 16, pair_up(vec(values.part(c, n * 16)), vec(values.part(c + 1, n * 16))));
      return;
    }
    for (int c = 0; c < 16; c += 2) {
      for (int n = 0; n < tiles; ++n) {
        const __m512 even = c >= from && c < to ? vec(values.part(c, n * 16)) : zero;
        const __m512 odd = c + 1 >= from && c + 1 < to ? vec(values.part(c + 1, n * 16)) : zero;
        _mm512_store_si512(out + n * kTile + c * 16, pair_up(even, odd));
      }
    }
  }

  void clear_values(int index, int column) {
    uint16_t* out = values_at(index, column);
    for (int n = 0; n < tiles; ++n) memset(out + n * kTile, 0, 16 * 16 * 2);
  }

  const uint16_t* queries_of(const PromptUnit& u) const { return q + static_cast<size_t>(u.block) * steps * kTile; }
  const uint16_t* keys_of(const PromptUnit& u) const { return k + static_cast<size_t>(u.index) * steps * kSpanTiles * kTile; }
  const uint16_t* values_of(const PromptUnit& u) const { return v + static_cast<size_t>(u.index) * kSpanSteps * tiles * kTile; }
  float* sums_of(const PromptUnit& u) const { return rows.acc + static_cast<size_t>(u.block) * kBlockRows * rows.padded; }

  void score(const PromptUnit& u) {
    settle(k);
    score_block(queries_of(u), keys_of(u), steps, u.columns, scores[u.slot]);
  }

  // Stores a row's weights, rounded; its sums with those as they are after rounding, so that the error of a weight that
  // outdoes all others falls out.
  NARU_INLINE __m512 put_weights(int r, const __m512* x, uint16_t* p) const {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    __m512 sum = _mm512_load_ps(rows.sums + static_cast<size_t>(r) * 16);
    for (int c = 0; c < kSpanSteps; ++c) {
      const __m512bh h = _mm512_cvtne2ps_pbh(x[2 * c + 1], x[2 * c]);
      _mm512_store_si512(p + c * kTile, (__m512i)h);
      sum = _mm512_dpbf16_ps(sum, h, ones);
    }
    return sum;
  }

  // Two rows of a span that all rows see: their weights, and their sums to be. The largest of the sums' lanes so far.
  template <bool kShift>
  NARU_INLINE __m512 soften_two_rows(const PromptUnit& u, int i, __m512 high) {
    const int r = u.block * kBlockRows + i;
    const float* s = scores[u.slot] + i * kSpan;
    uint16_t* p = weights[u.slot] + i * 32;
    __m512 x[2 * kSpanTiles];
    for (int c = 0; c < 2 * kSpanTiles; ++c) {
      x[c] = _mm512_load_ps(s + c * 16);
      if (kShift) x[c] = _mm512_sub_ps(x[c], _mm512_set1_ps(rows.top[r + c / kSpanTiles]));
    }
    exp2_rough<2 * kSpanTiles>(x);
    for (int j = 0; j < 2; ++j) {
      const __m512 sum = put_weights(r + j, x + j * kSpanTiles, p + j * 32);
      _mm512_store_ps(rows.next + (i + j) * 16, sum);
      high = _mm512_max_ps(sum, high);
    }
    return high;
  }

  // False: some row's top has to move first; the rows' state is as before.
  bool keep_sums(const PromptUnit& u, __m512 high) {
    if (_mm512_cmp_ps_mask(high, _mm512_set1_ps(kGrownSum), _CMP_GE_OQ) != 0) return false;
    rows.commit_sums(u.block);
    return true;
  }

  template <bool kShift>
  bool soften_all(const PromptUnit& u) {
    __m512 high = _mm512_setzero_ps();
    for (int i = 0; i < kBlockRows; i += 2) high = soften_two_rows<kShift>(u, i, high);
    return keep_sums(u, high);
  }

  // The top of row r for a span with these best scores, in lanes. Mostly without looking for the best of all.
  NARU_INLINE float top_for(int r, __m512 best) {
    const float top = rows.top[r];
    if (top == kUnset) {
      if (_mm512_cmp_ps_mask(best, _mm512_set1_ps(kCalm), _CMP_GT_OQ) == 0 &&
          _mm512_cmp_ps_mask(best, _mm512_set1_ps(-kCalm), _CMP_GE_OQ) != 0)
        return rows.top[r] = 0.f;
    } else if (_mm512_cmp_ps_mask(best, _mm512_set1_ps(top + kGrown), _CMP_GE_OQ) == 0) {
      return top;
    }
    const float high = _mm512_reduce_max_ps(best);
    // A row that sees nothing here keeps what it has: its weights are 2^kNever.
    return high > kNever ? rows.raise_top(r, high) : 0.f;
  }

  // One row of a span of which it may not see all, or whose top is not known yet.
  NARU_INLINE void soften_row(const PromptUnit& u, int i) {
    const int r = u.block * kBlockRows + i, columns = u.columns;
    const float* s = scores[u.slot] + i * kSpan;
    uint16_t* p = weights[u.slot] + i * 32;
    const uint64_t seen = rows.seen(r, u.span);
    const __m512 never = _mm512_set1_ps(kNever);
    __m512 x[kSpanTiles];
    for (int c = 0; c < kSpanTiles; ++c)
      x[c] = c < columns ? _mm512_mask_mov_ps(never, static_cast<__mmask16>(seen >> (16 * c)), _mm512_load_ps(s + c * 16))
                         : never;
    // The second operand is kept where the first is NaN.
    __m512 best = never;
    for (const __m512& each : x) best = _mm512_max_ps(each, best);
    const __m512 top = _mm512_set1_ps(top_for(r, best));
    for (__m512& each : x) each = _mm512_sub_ps(each, top);
    exp2_rough<kSpanTiles>(x);
    _mm512_store_ps(rows.sums + static_cast<size_t>(r) * 16, put_weights(r, x, p));
  }

  void mix(const PromptUnit& u) {
    const uint16_t* p = weights[u.slot];
    const uint16_t* values = values_of(u);
    float* acc = sums_of(u);
    const int used = (u.columns + 1) / 2, stride = rows.padded * 4;
    const size_t ldb = static_cast<size_t>(tiles) * kTile;
    settle(p);
    int n = 0;
    for (; n + 4 <= tiles; n += 4) mix_tiles<4>(p, values + n * kTile, ldb, used, acc + n * 16, stride);
    for (; n + 2 <= tiles; n += 2) mix_tiles<2>(p, values + n * kTile, ldb, used, acc + n * 16, stride);
    for (; n < tiles; ++n) mix_tiles<1>(p, values + n * kTile, ldb, used, acc + n * 16, stride);
  }

  void soften_rows(const PromptUnit& u) {
    for (int i = 0; i < kBlockRows; ++i) soften_row(u, i);
    rows.update_state(u.block);
  }

  void soften(const PromptUnit& u) {
    const BlockState state = rows.state[u.block];
    const bool whole = state != kFresh && rows.sees_all(u.block, u.span);
    if (whole && (state == kLevel ? soften_all<false>(u) : soften_all<true>(u))) return;
    soften_rows(u);
  }

  void advance(const PromptUnit& before, const PromptUnit& now, const PromptUnit& next) {
    // What is before is mixed first: the block's sums may be the same and may have to fade.
    if (before.block >= 0) mix(before);
    if (next.block >= 0) score(next);
    if (now.block >= 0) soften(now);
  }
};

}  // namespace

size_t prompt_pairs_scratch(int max_rows, int padded_dim) {
  Pairs kernel;
  return kernel.carve(nullptr, max_rows, padded_dim, padded_dim);
}

void attend_prompt_pairs(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch) {
  Pairs kernel;
  kernel.carve(scratch, max_rows, job.kv->head_dim, job.kv->padded_dim);
  with_kv_format(*job.kv, [&](auto* element) {
    walk_prompt<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(&kernel, job, item, head);
  });
}

}  // namespace naru

#endif
