// Scales of a unit's groups as registers, for the tile kernels.
#pragma once

#include "matrix.h"

#if defined(__AMX_TILE__)

namespace naru {

// Scale and minimum of one group, all sixteen rows of the panel.
struct Scales {
  __m512 d;
  __m512 m;
};

NARU_INLINE __m512 halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
NARU_INLINE __m512 bytes(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

template <int F>
NARU_INLINE Scales scales(const uint8_t* unit, int i) {
  if (F == kW4K)
    return {_mm512_mul_ps(halves(unit + kW4KSuperAt), bytes(unit + scale_at(F, i))),
            _mm512_sub_ps(_mm512_setzero_ps(),
                          _mm512_mul_ps(halves(unit + kW4KSuperAt + 32), bytes(unit + kW4KMinAt + i * 16)))};
  const __m512 d = halves(unit + scale_at(F, i));
  if (F == kW4M) return {d, halves(unit + kW4MinAt)};
  return {d, _mm512_mul_ps(d, _mm512_set1_ps(F == kW4 ? -8.f : 0.f))};
}

}  // namespace naru

#endif
