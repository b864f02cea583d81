// Generated tokens: integer products of whole groups in tiles, scaled in registers.
#include "gemm_tiles.h"
#include "pairs.h"
#include "tile_scales.h"

#if defined(__AMX_TILE__)

namespace naru {
namespace {

constexpr int kTile = kTileRows;  // rows of activations, columns of output
constexpr int kFlight = 4;          // groups whose integer products are under way

// Quants of a panel as signed bytes, [group][8][16 rows][4].
template <int F>
void unpack_bytes(const uint8_t* panel, int groups, int8_t* out) {
  constexpr Unit u = unit_of(F);
  const __m512i low = _mm512_set1_epi8(15), bias = _mm512_set1_epi8(-128);
  const uint8_t* unit = panel;
  for (int first = 0; first < groups; first += u.groups, unit += u.bytes) {
    for (int i = 0; i < u.groups && first + i < groups; ++i, out += 512) {
      const uint8_t* q = unit + i * u.quants;
      if (F == kW8) {
        for (int j = 0; j < 8; ++j)
          _mm512_store_si512(out + j * 64, _mm512_xor_si512(_mm512_load_si512(q + j * 64), bias));
      } else {
        for (int j = 0; j < 4; ++j) {
          const __m512i b = _mm512_load_si512(q + j * 64);
          _mm512_store_si512(out + j * 64, _mm512_and_si512(b, low));
          _mm512_store_si512(out + 256 + j * 64, _mm512_and_si512(_mm512_srli_epi16(b, 4), low));
        }
      }
    }
  }
}

// One group's integer products into `out`. Tiles 4 and 5 are shared; C differs, so that groups overlap.
template <int C>
NARU_INLINE void group_product(const int8_t* a, const int8_t* b, int32_t* out) {
  if constexpr (C == 0) {
    _tile_zero(0);
    _tile_loadd(4, a, 32);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(0, 4, 5);
    _tile_stored(0, out, 64);
  } else if constexpr (C == 1) {
    _tile_zero(1);
    _tile_loadd(4, a, 32);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(1, 4, 5);
    _tile_stored(1, out, 64);
  } else if constexpr (C == 2) {
    _tile_zero(2);
    _tile_loadd(4, a, 32);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(2, 4, 5);
    _tile_stored(2, out, 64);
  } else {
    _tile_zero(3);
    _tile_loadd(4, a, 32);
    _tile_loadd(5, b, 64);
    _tile_dpbssd(3, 4, 5);
    _tile_stored(3, out, 64);
  }
}

// What the loop over groups carries.
struct ByteLoop {
  const uint8_t* panel;
  const int8_t* quants;
  int groups;
  QRows x;
  const uint8_t* ahead;
  int32_t* dots;  // [kFlight][16][16]
};

template <int C>
NARU_INLINE void start_group(const ByteLoop& l, int g) {
  if (g < l.groups) group_product<C>(l.x.q + g * kQStep, l.quants + g * 512, l.dots + C * kTile * kTile);
}

template <int F, int M, int C>
NARU_INLINE void scale_group(const ByteLoop& l, int g, __m512 (&acc)[M]) {
  constexpr Unit u = unit_of(F);
  if (g >= l.groups) return;
  const size_t offset = static_cast<size_t>(g / u.groups) * u.bytes;
  // Asked for here and not while unpacking: memory then works evenly.
  fetch_ahead<F>(l.ahead, offset, g % u.groups);
  const Scales w = scales<F>(l.panel + offset, g % u.groups);
  const GroupMeta* meta = l.x.meta + g * kTileRows;
  const int32_t* dots = l.dots + C * kTile * kTile;
  for (int m = 0; m < M; ++m) {
    const __m512 f = _mm512_cvtepi32_ps(_mm512_load_si512(dots + m * kTile));
    acc[m] = _mm512_fmadd_ps(f, _mm512_mul_ps(w.d, _mm512_set1_ps(meta[m].scale)), acc[m]);
    if (F != kW8) acc[m] = _mm512_fmadd_ps(w.m, _mm512_set1_ps(meta[m].sum), acc[m]);
  }
}

// y[m][16] for M rows, from unpacked quants. The scaling of a group runs while the products of the next three do.
template <int F, int M>
void byte_rows(const uint8_t* panel, const int8_t* quants, int groups, const QRows& x, const uint8_t* ahead, float* y) {
  alignas(64) int32_t dots[kFlight * kTile * kTile];
  const ByteLoop l{panel, quants, groups, x, ahead, dots};
  __m512 acc[M];
  for (int m = 0; m < M; ++m) acc[m] = _mm512_setzero_ps();
  start_group<0>(l, 0);
  start_group<1>(l, 1);
  start_group<2>(l, 2);
  for (int g = 0; g < groups; g += kFlight) {
    start_group<3>(l, g + 3);
    scale_group<F, M, 0>(l, g, acc);
    start_group<0>(l, g + 4);
    scale_group<F, M, 1>(l, g + 1, acc);
    start_group<1>(l, g + 5);
    scale_group<F, M, 2>(l, g + 2, acc);
    start_group<2>(l, g + 6);
    scale_group<F, M, 3>(l, g + 3, acc);
  }
  for (int m = 0; m < M; ++m) _mm512_storeu_ps(y + m * kTile, acc[m]);
}

template <int F>
void byte_panel_rows(const Linear& job, const Segment& s, int index, const uint8_t* panel, const uint8_t* ahead) {
  const int groups = job.w->k / kGroup;
  int8_t* quants = reinterpret_cast<int8_t*>(job.scratch);
  unpack_bytes<F>(panel, groups, quants);
  settle(quants);
  const int column = s.first_row + index * kPanel;
  const int left = s.rows - index * kPanel;
  alignas(64) float y[kTile * kTile];
  for (int row = 0; row < job.rows; row += kTile) {
    const int rows = job.rows - row < kTile ? job.rows - row : kTile;
    const QRows x = rows_from(*job.x, row);
    if (rows <= 4)
      byte_rows<F, 4>(panel, quants, groups, x, ahead, y);
    else if (rows <= 8)
      byte_rows<F, 8>(panel, quants, groups, x, ahead, y);
    else if (rows <= 12)
      byte_rows<F, 12>(panel, quants, groups, x, ahead, y);
    else
      byte_rows<F, 16>(panel, quants, groups, x, ahead, y);
    put_tile(job, y, kTile, row, rows, column, left < kPanel ? left : kPanel);
    ahead = panel;
  }
}

}  // namespace

bool has_byte_tiles(int format) { return is_quantized(format) && format != kW6K; }

void byte_tile_panel(const Linear& job, const Segment& s, int index, const uint8_t* panel, const uint8_t* ahead) {
  switch (s.format) {
    case kW4:
      return byte_panel_rows<kW4>(job, s, index, panel, ahead);
    case kW4M:
      return byte_panel_rows<kW4M>(job, s, index, panel, ahead);
    case kW8:
      return byte_panel_rows<kW8>(job, s, index, panel, ahead);
    default:
      return byte_panel_rows<kW4K>(job, s, index, panel, ahead);
  }
}

}  // namespace naru

#endif
