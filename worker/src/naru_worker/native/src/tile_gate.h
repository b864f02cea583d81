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

// Sums of up to 32 rows, of which sixteen columns are gates and sixteen what they gate, on their way to being columns
// [column, column + 16) of rows [row, row + rows) of `to`. A row at a time, so that it finds room between tile products.
struct Gating {
  const float* y = nullptr;  // [32][32]
  const Activations* to = nullptr;
  const float* gate_bias = nullptr;  // may be null, both
  const float* up_bias = nullptr;
  int row = 0, rows = 0, column = 0;
  int done = 0;

  NARU_INLINE void one() {
    __m512 gate = _mm512_load_ps(y + done * 32);
    __m512 up = _mm512_load_ps(y + done * 32 + 16);
    if (gate_bias != nullptr) {
      gate = _mm512_add_ps(gate, _mm512_loadu_ps(gate_bias));
      up = _mm512_add_ps(up, _mm512_loadu_ps(up_bias));
    }
    const int r = row + done;
    bf16* h = to->h + static_cast<size_t>(r / kTileRows) * to->width * kTileRows + column / 32 * 512 +
              r % kTileRows * 32 + column % 32;
    _mm256_store_si256(reinterpret_cast<__m256i*>(h), (__m256i)_mm512_cvtneps_pbh(silu_times(gate, up)));
    ++done;
  }
  void rest() {
    while (done < rows) one();
  }
};

}  // namespace naru

#endif
