// Weights of a group of 32 columns as one tile of bf16 pairs, [16 column pairs][16 rows][2].
#pragma once

#include "pairs.h"
#include "tile_scales.h"

#if defined(__AMX_TILE__)

namespace naru {

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

// A group is unpacked in this many slices, short enough to find room between two steps of tile products.
constexpr int kSlices = 4;

// Slice j of group i of a unit, into the group's tile.
template <int F>
NARU_INLINE void unpack_slice(const uint8_t* unit, int i, int j, uint16_t* out) {
  const uint8_t* q = unit + i * unit_of(F).quants;
  if (F == kW8 || F == kW6K) {
    Scales w{};
    if (F == kW8) {
      w = scales<kW8>(unit, i);
    } else {
      const __m128i sc =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + scale_at(kW6K, i) + (j / 2) * kPanel));
      w.d = _mm512_mul_ps(halves(unit + kW6KSuperAt), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sc)));
    }
    unpack_quad<F>(_mm512_load_si512(q + j * 128), 0, w, out + j * 128);
    unpack_quad<F>(_mm512_load_si512(q + j * 128 + 64), 0, w, out + j * 128 + 64);
  } else {
    const Scales w = scales<F>(unit, i);
    const __m512i v = _mm512_load_si512(q + j * 64);
    unpack_quad<F>(v, 0, w, out + j * 64);
    unpack_quad<F>(v, 4, w, out + 256 + j * 64);
  }
}

}  // namespace naru

#endif
