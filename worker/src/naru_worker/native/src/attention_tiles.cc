// Attention of many query rows over a half-precision cache on AMX tiles: queries, keys, weights and values as bf16, sums
// in float.
#include "attention.h"

#include <cmath>

#include "pairs.h"

#if defined(__AMX_TILE__)

namespace naru {
namespace {

constexpr int kSpan = 64;  // tokens scored between two looks at the running maximum
constexpr float kNever = -1e30f;
constexpr float kLog2E = 1.44269504088896341f;

// The member's buffers. Tiles are 1 KB: 16 rows of 32 bf16, or 16 pairs of 16 columns.
struct Tiles {
  int rows;    // real query rows
  int blocks;  // of 16 rows
  int dim, padded;
  int steps;     // of 32 dimensions
  uint16_t* q;   // [block][step]
  uint16_t* k;   // [step][kSpan / 16]
  uint16_t* v;   // [kSpan / 32][padded / 16]
  uint16_t* p;   // [block][kSpan / 32]
  float* scores;  // [rows][kSpan]
  float* acc;     // [rows][padded]
  float* top;
  float* sum;
  int* begin;
  int* end;
};

Tiles carve(float* scratch, int rows, int dim, int padded) {
  Tiles t{};
  const int max_rows = round_up(rows, 16);
  t.rows = rows;
  t.blocks = max_rows / 16;
  t.dim = dim;
  t.padded = padded;
  t.steps = round_up(dim, 32) / 32;
  t.q = reinterpret_cast<uint16_t*>(scratch);
  t.k = t.q + static_cast<size_t>(t.blocks) * t.steps * 512;
  t.v = t.k + static_cast<size_t>(t.steps) * kSpan / 16 * 512;
  t.p = t.v + static_cast<size_t>(kSpan / 32) * padded / 16 * 512;
  t.scores = reinterpret_cast<float*>(t.p + static_cast<size_t>(t.blocks) * kSpan / 32 * 512);
  t.acc = t.scores + static_cast<size_t>(max_rows) * kSpan;
  t.top = t.acc + static_cast<size_t>(max_rows) * padded;
  t.sum = t.top + max_rows;
  t.begin = reinterpret_cast<int*>(t.sum + max_rows);
  t.end = t.begin + max_rows;
  return t;
}

__m512 vec(const V16& a) { return (__m512)a.v[0]; }

void load_queries(const Attention& job, const AttentionItem& item, int head, const Tiles& t) {
  const int group = job.num_heads / job.kv->num_heads;
  memset(t.q, 0, static_cast<size_t>(t.blocks) * t.steps * 1024);
  memset(t.acc, 0, static_cast<size_t>(t.blocks) * 16 * t.padded * sizeof(float));
  const V16 scale = set16(job.scale * kLog2E);
  for (int r = 0; r < t.rows; ++r) {
    const int token = r / group;
    const float* q = job.q + static_cast<size_t>(item.token + token) * job.ldq +
                     static_cast<size_t>(head * group + r % group) * t.dim;
    uint16_t* to = t.q + static_cast<size_t>(r / 16) * t.steps * 512 + r % 16 * 32;
    for (int d = 0; d < t.dim; d += 16) {
      alignas(32) bf16 half[16];
      store16(half, load16n(q + d, t.dim - d) * scale);
      memcpy(to + d / 32 * 512 + d % 32, half, 32);
    }
    const int position = item.position + token;
    t.end[r] = position + 1;
    t.begin[r] = job.window > 0 && position + 1 > job.window ? position + 1 - job.window : 0;
    t.top[r] = kNever;
    t.sum[r] = 0.f;
  }
}

// Sixteen tokens' keys, [dim][block_size] in the cache, to one tile per step. What lies in unused slots stays in its own
// column of the scores, which nobody may see.
void pack_keys(const Tiles& t, const f16* keys, int stride, int column) {
  for (int d = 0; d < t.steps * 32; d += 2) {
    const __m512 even = d < t.dim ? vec(load16(keys + static_cast<size_t>(d) * stride)) : _mm512_setzero_ps();
    const __m512 odd = d + 1 < t.dim ? vec(load16(keys + static_cast<size_t>(d + 1) * stride)) : _mm512_setzero_ps();
    _mm512_store_si512(t.k + (static_cast<size_t>(d / 32) * (kSpan / 16) + column) * 512 + d % 32 * 16,
                       bf16_pair(even, odd));
  }
}

// Sixteen tokens' values, of which [from, to) are real; the others become 0, since 0 times NaN is NaN.
void pack_values(const Tiles& t, const f16* values, int row, int from, int to) {
  const int tiles = t.padded / 16;
  for (int c = 0; c < 16; c += 2) {
    for (int n = 0; n < tiles; ++n) {
      const f16* v = values + static_cast<size_t>(c) * t.padded + n * 16;
      const __m512 even = c >= from && c < to ? vec(load16(v)) : _mm512_setzero_ps();
      const __m512 odd = c + 1 >= from && c + 1 < to ? vec(load16(v + t.padded)) : _mm512_setzero_ps();
      _mm512_store_si512(t.v + (static_cast<size_t>(row / 32) * tiles + n) * 512 + (row % 32 + c) * 16,
                         bf16_pair(even, odd));
    }
  }
}

void score(const Tiles& t) {
  for (int b = 0; b < t.blocks; ++b) {
    const uint16_t* q = t.q + static_cast<size_t>(b) * t.steps * 512;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < t.steps; ++s) {
      const uint16_t* k = t.k + static_cast<size_t>(s) * (kSpan / 16) * 512;
      _tile_loadd(4, q + s * 512, 64);
      _tile_loadd(5, k, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, k + 512, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, k + 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, k + 1536, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* out = t.scores + static_cast<size_t>(b) * 16 * kSpan;
    _tile_stored(0, out, kSpan * 4);
    _tile_stored(1, out + 16, kSpan * 4);
    _tile_stored(2, out + 32, kSpan * 4);
    _tile_stored(3, out + 48, kSpan * 4);
  }
}

// 2^x for x <= 0, to 1e-4: what follows is rounded to eight bits.
NARU_INLINE __m512 exp2_rough(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, 0);  // x - round(x), in [-0.5, 0.5]
  __m512 p = _mm512_set1_ps(0.0555054f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402265f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931472f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, r));
}

// Scores of tokens [from, to) to weights, for row r.
void soften_row(const Tiles& t, int r, int from, int to) {
  float* s = t.scores + static_cast<size_t>(r) * kSpan;
  uint16_t* p = t.p + static_cast<size_t>(r / 16) * (kSpan / 32) * 512 + r % 16 * 32;
  const __m512 never = _mm512_set1_ps(kNever);
  // Bit i: token from + i is seen.
  const int lo = t.begin[r] > from ? t.begin[r] - from : 0;
  const int hi = (t.end[r] < to ? t.end[r] : to) - from;
  uint64_t seen = 0;
  if (lo < hi) seen = (hi == 64 ? ~uint64_t{0} : (uint64_t{1} << hi) - 1) & (~uint64_t{0} << lo);
  __m512 x[4];
  __m512 best = never;
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_mask_mov_ps(never, static_cast<__mmask16>(seen >> (16 * i)), _mm512_load_ps(s + i * 16));
    best = _mm512_max_ps(x[i], best);  // the second operand is kept where the first is NaN
  }
  const float was = t.top[r];
  const float high = _mm512_reduce_max_ps(best);
  const float now = high > was ? high : was;
  const __m512 top = _mm512_set1_ps(now);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < 4; i += 2) {
    __m512 w[2];
    for (int j = 0; j < 2; ++j) {
      const __mmask16 real = _mm512_cmp_ps_mask(x[i + j], never, _CMP_GT_OQ);
      w[j] = _mm512_maskz_mov_ps(real, exp2_rough(_mm512_sub_ps(x[i + j], top)));
      sum = _mm512_add_ps(sum, w[j]);
    }
    _mm512_store_si512(p + i / 2 * 512, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
  }
  const float fade = was == now ? 1.f : std::exp2(was - now);
  t.top[r] = now;
  t.sum[r] = t.sum[r] * fade + _mm512_reduce_add_ps(sum);
  if (fade != 1.f) {
    const V16 f = set16(fade);
    float* acc = t.acc + static_cast<size_t>(r) * t.padded;
    for (int d = 0; d < t.padded; d += 16) store16(acc + d, load16(acc + d) * f);
  }
}

void mix(const Tiles& t, int tokens) {
  const int tiles = t.padded / 16, stride = t.padded * 4;
  for (int b = 0; b < t.blocks; ++b) {
    const uint16_t* p = t.p + static_cast<size_t>(b) * (kSpan / 32) * 512;
    float* acc = t.acc + static_cast<size_t>(b) * 16 * t.padded;
    int n = 0;
    for (; n + 2 <= tiles; n += 2) {
      _tile_loadd(0, acc + n * 16, stride);
      _tile_loadd(1, acc + n * 16 + 16, stride);
      for (int s = 0; s * 32 < tokens; ++s) {
        const uint16_t* v = t.v + (static_cast<size_t>(s) * tiles + n) * 512;
        _tile_loadd(4, p + s * 512, 64);
        _tile_loadd(5, v, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, v + 512, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, acc + n * 16, stride);
      _tile_stored(1, acc + n * 16 + 16, stride);
    }
    for (; n < tiles; ++n) {
      _tile_loadd(0, acc + n * 16, stride);
      for (int s = 0; s * 32 < tokens; ++s) {
        _tile_loadd(4, p + s * 512, 64);
        _tile_loadd(5, t.v + (static_cast<size_t>(s) * tiles + n) * 512, 64);
        _tile_dpbf16ps(0, 4, 5);
      }
      _tile_stored(0, acc + n * 16, stride);
    }
  }
}

void walk(const Tiles& t, const KVCache& kv, int layer, int head, const int32_t* blocks, int from, int to) {
  const size_t stride = kv.block_bytes();
  const int size = kv.block_size;
  // From a multiple of the span, whatever the tile's first row sees: a row's sums must not depend on its tile.
  for (int start = from / kSpan * kSpan; start < to; start += kSpan) {
    const int stop = start + kSpan < to ? start + kSpan : to;
    const int padded = round_up(stop - start, 32);
    for (int c = start; c < start + padded; c += 16) {
      const int at = c - start;
      if (c >= stop) {  // the second half of the last 32 tokens: no values
        pack_values(t, nullptr, at, 0, 0);
        continue;
      }
      const size_t block = static_cast<size_t>(blocks[c / size]) * stride;
      pack_keys(t, reinterpret_cast<const f16*>(kv.keys(layer, head) + block) + c % size, size, at / 16);
      pack_values(t, reinterpret_cast<const f16*>(kv.values(layer, head) + block) + static_cast<size_t>(c % size) * t.padded,
                  at, from > c ? from - c : 0, stop - c < 16 ? stop - c : 16);
    }
    settle(t.k);
    score(t);
    for (int r = 0; r < t.rows; ++r) soften_row(t, r, start, stop);
    settle(t.p);
    mix(t, padded);
  }
}

}  // namespace

size_t attention_tiles_floats(int rows, int padded_dim) {
  const size_t r = static_cast<size_t>(round_up(rows, 16)), d = static_cast<size_t>(round_up(padded_dim, 32));
  return r * d / 2 + d * kSpan / 2 + d * kSpan / 2 + r * kSpan / 2 + r * kSpan + r * d + 4 * r + 64;
}

void attention_tiles_item(const Attention& job, const AttentionItem& item, int head, float* scratch) {
  const KVCache& kv = *job.kv;
  const int group = job.num_heads / kv.num_heads;
  const Tiles t = carve(scratch, item.num_tokens * group, kv.head_dim, kv.padded_dim);
  load_queries(job, item, head, t);
  const int from = t.begin[0], to = t.end[t.rows - 1];
  walk(t, kv, job.layer, head, item.blocks, from, to);
  for (int r = 0; r < t.rows; ++r) {
    // sum is 0 only when every score was NaN: the row is then zero instead of NaN.
    const V16 inverse = set16(t.sum[r] > 0.f ? 1.f / t.sum[r] : 0.f);
    const float* acc = t.acc + static_cast<size_t>(r) * t.padded;
    float* out = job.out + static_cast<size_t>(item.token + r / group) * job.ldo +
                 static_cast<size_t>(head * group + r % group) * t.dim;
    for (int d = 0; d < t.dim; d += 16) store16n(out + d, load16(acc + d) * inverse, t.dim - d);
  }
}

}  // namespace naru

#endif
