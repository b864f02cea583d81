// Prompt tokens: weights unpacked to bf16, a pair of panels at a time, and multiplied without scaling.
#include "gemm_tiles.h"
#include "pairs.h"
#include "tile_scales.h"

#if defined(__AMX_TILE__)

namespace naru {
namespace {

constexpr int kTile = kTileRows;  // rows of activations, columns of output

// Columns are taken in blocks of at most this many tiles: 96 KB of unpacked weights for a pair of panels, a small part of
// the L2 cache. Smaller blocks that fit the L1 cache were no faster.
constexpr int kBlockSteps = 48;

// Four columns held in the bytes (or nibbles at bit `at`) of each lane, to two registers of pairs.
template <int F>
NARU_INLINE void unpack_quad(__m512i v, int at, const Scales& w, uint16_t* out) {
  __m512 x[4];
  if (F == kW8 || F == kW6K) {
    const __m512i mask = _mm512_set1_epi32(255);
    const __m512 m = _mm512_mul_ps(w.d, _mm512_set1_ps(-128.f));
    for (int c = 0; c < 4; ++c)
      x[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(v, 8 * c), mask)), w.d, m);
  } else {
    // A permutation looks at the lowest four bits of a lane only: mask and conversion in one.
    const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int c = 0; c < 4; ++c)
      x[c] = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 8 * c + at), table), w.d, w.m);
  }
  _mm512_store_si512(out, bf16_pair(x[0], x[1]));
  _mm512_store_si512(out + 32, bf16_pair(x[2], x[3]));
}

// Groups [begin, end) of a panel as bf16 tiles, [group][16 column pairs][16 rows][2].
template <int F>
void unpack_floats(const uint8_t* panel, int begin, int end, uint16_t* out) {
  constexpr Unit u = unit_of(F);
  for (int g = begin; g < end; ++g, out += 512) {
    const int i = g % u.groups;
    const uint8_t* unit = panel + static_cast<size_t>(g / u.groups) * u.bytes;
    const uint8_t* q = unit + i * u.quants;
    if (F == kW8 || F == kW6K) {
      for (int j = 0; j < 8; ++j) {
        Scales w{};
        if (F == kW8) {
          w = scales<kW8>(unit, i);
        } else {
          const __m128i sc = _mm_loadu_si128(
              reinterpret_cast<const __m128i*>(unit + scale_at(kW6K, i) + (j / 4) * kPanel));
          w.d = _mm512_mul_ps(halves(unit + kW6KSuperAt), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sc)));
        }
        unpack_quad<F>(_mm512_load_si512(q + j * 64), 0, w, out + j * 64);
      }
    } else {
      const Scales w = scales<F>(unit, i);
      for (int j = 0; j < 4; ++j) {
        const __m512i v = _mm512_load_si512(q + j * 64);
        unpack_quad<F>(v, 0, w, out + j * 64);
        unpack_quad<F>(v, 4, w, out + 256 + j * 64);
      }
    }
  }
}

void unpack_any(const Segment& s, const uint8_t* panel, int begin, int end, uint16_t* out) {
  switch (s.format) {
    case kW4:
      return unpack_floats<kW4>(panel, begin, end, out);
    case kW4M:
      return unpack_floats<kW4M>(panel, begin, end, out);
    case kW8:
      return unpack_floats<kW8>(panel, begin, end, out);
    case kW4K:
      return unpack_floats<kW4K>(panel, begin, end, out);
    default:
      return unpack_floats<kW6K>(panel, begin, end, out);
  }
}

// 32 x 32 outputs, added to y (row stride 32) unless it is the first part of the columns. Tiles 0..3 accumulate, 4 and 5
// are activations, 6 and 7 weights.
void product_2x2(const bf16* a, size_t tile_row, const uint16_t* b, size_t panel, int steps, bool first, float* y) {
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, y, 128);
    _tile_loadd(1, y + 16, 128);
    _tile_loadd(2, y + 512, 128);
    _tile_loadd(3, y + 528, 128);
  }
  for (int t = 0; t < steps; ++t, a += 512, b += 512) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a + tile_row, 64);
    _tile_loadd(7, b + panel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, 128);
  _tile_stored(1, y + 16, 128);
  _tile_stored(2, y + 512, 128);
  _tile_stored(3, y + 528, 128);
}

void product_2x1(const bf16* a, size_t tile_row, const uint16_t* b, int steps, bool first, float* y) {
  if (first) {
    _tile_zero(0);
    _tile_zero(2);
  } else {
    _tile_loadd(0, y, 128);
    _tile_loadd(2, y + 512, 128);
  }
  for (int t = 0; t < steps; ++t, a += 512, b += 512) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_loadd(5, a + tile_row, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, y, 128);
  _tile_stored(2, y + 512, 128);
}

}  // namespace

size_t tile_scratch_floats(int k) {
  const size_t unpacked = static_cast<size_t>(k) * kPanel / 4;                    // bytes of one panel
  const size_t blocks = 2 * kBlockSteps * 512 / 2 + kMaxTileRows * 32;            // bf16 of two panels, sums
  return (unpacked > blocks ? unpacked : blocks) + 64;
}

void float_tile_panels(const Linear& job, const Segment& s, int index, int count) {
  const int steps = job.w->k / kGroup;
  const size_t tile_row = static_cast<size_t>(steps) * 512;
  uint16_t* b = reinterpret_cast<uint16_t*>(job.scratch);
  float* sums = job.scratch + kBlockSteps * 512;
  const int blocks = (steps + kBlockSteps - 1) / kBlockSteps;
  const int column = s.first_row + index * kPanel;
  const int left = s.rows - index * kPanel;
  for (int block = 0; block < blocks; ++block) {
    const int begin = steps * block / blocks, end = steps * (block + 1) / blocks;
    const size_t panel = static_cast<size_t>(end - begin) * 512;
    for (int i = 0; i < count; ++i)
      unpack_any(s, s.data + static_cast<size_t>(index + i) * s.panel_bytes, begin, end, b + i * panel);
    settle(b);
    for (int row = 0; row < job.rows; row += 32) {
      const bf16* a = job.x->h + static_cast<size_t>(row / kTile) * tile_row + static_cast<size_t>(begin) * 512;
      float* y = sums + static_cast<size_t>(row) * 32;
      if (count == 2)
        product_2x2(a, tile_row, b, panel, end - begin, block == 0, y);
      else
        product_2x1(a, tile_row, b, end - begin, block == 0, y);
      if (block + 1 < blocks) continue;
      const int rows = job.rows - row < 32 ? job.rows - row : 32;
      put_tile(job, y, 32, row, rows, column, left < kPanel ? left : kPanel);
      if (count == 2)
        put_tile(job, y + 16, 32, row, rows, column + kPanel, left - kPanel < kPanel ? left - kPanel : kPanel);
    }
  }
}

}  // namespace naru

#endif
