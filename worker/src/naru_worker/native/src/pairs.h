// Pairs of bf16 in one lane, as tile products want their right operand. AVX512 only.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

namespace naru {

// (even, odd) of sixteen lanes to one register. Rounds halves up: one instruction less than to even, and as unbiased on
// anything but exact ties.
NARU_INLINE __m512i bf16_pair(__m512 even, __m512 odd) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i b = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, a, b);
}

// GCC does not know that tile loads read memory: whatever they read must have been written before this point.
NARU_INLINE void settle(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

}  // namespace naru

#endif
