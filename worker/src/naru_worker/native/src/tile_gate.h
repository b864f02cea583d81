// Gated activation of one tile of sums, straight into the tiles of bf16 that the next layer reads.
#pragma once

#include "activations.h"
#include "pairs.h"

#if defined(__AMX_TILE__)

namespace naru {

// silu(gate) * up, to 1e-5: rounding to bf16 follows.
NARU_INLINE __m512 silu_times(__m512 gate, __m512 up) {
  // e^-gate = 2^t, t = n + r: a polynomial in r, then n into the exponent. Saturates to infinity and 0.
  const __m512 t = _mm512_mul_ps(gate, _mm512_set1_ps(-1.44269504088896341f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(0.00961812911f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0555041087f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240226507f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147181f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  const __m512 e = _mm512_scalef_ps(p, n);
  return _mm512_mul_ps(_mm512_mul_ps(gate, up), _mm512_rcp14_ps(_mm512_add_ps(e, _mm512_set1_ps(1.0f))));
}

// y holds `rows` rows of sums, stride `ldy`: sixteen columns of gates, then sixteen of what they gate. Their product goes
// to columns [column, column + 16) of rows [row, row + rows) of `to`. Biases may be null.
inline void gate_tile(const float* y, int ldy, int rows, const float* gate_bias, const float* up_bias,
                      const Activations& to, int row, int column) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 bg = gate_bias == nullptr ? zero : _mm512_loadu_ps(gate_bias);
  const __m512 bu = up_bias == nullptr ? zero : _mm512_loadu_ps(up_bias);
  for (int m = 0; m < rows; ++m) {
    const __m512 gate = _mm512_add_ps(_mm512_loadu_ps(y + m * ldy), bg);
    const __m512 up = _mm512_add_ps(_mm512_loadu_ps(y + m * ldy + 16), bu);
    const int r = row + m;
    bf16* h = to.h + static_cast<size_t>(r / kTileRows) * to.width * kTileRows + column / 32 * 512 +
              r % kTileRows * 32 + column % 32;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(h), (__m256i)_mm512_cvtneps_pbh(silu_times(gate, up)));
  }
}

}  // namespace naru

#endif
