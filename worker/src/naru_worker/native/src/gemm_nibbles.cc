// Dot products of nibble weights with byte activations.
#include "gemm.h"
#include "scales.h"

namespace naru {
namespace {

// Integer dot products of one group of 32 columns: out[m] = sum q * x, exact. q points at this part's 8 or 16 rows.
#if defined(__AVX512F__)
template <int M>
NARU_INLINE void group_dots(const uint8_t* q, const int8_t* x, vi* out) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i w[8];
  for (int j = 0; j < 4; ++j) {
    const __m512i b = _mm512_load_si512(q + j * 64);
    w[j] = _mm512_and_si512(b, low);
    w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(b, 4), low);
  }
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    __m512i a = _mm512_setzero_si512(), b = _mm512_setzero_si512();
    for (int j = 0; j < 4; ++j) {
      int32_t xa, xb;
      memcpy(&xa, row + j * 4, 4);
      memcpy(&xb, row + 16 + j * 4, 4);
      a = _mm512_dpbusd_epi32(a, w[j], _mm512_set1_epi32(xa));
      // With few rows two chains hide the latency; with many rows the other rows do.
      if (M < 4)
        b = _mm512_dpbusd_epi32(b, w[j + 4], _mm512_set1_epi32(xb));
      else
        a = _mm512_dpbusd_epi32(a, w[j + 4], _mm512_set1_epi32(xb));
    }
    out[m] = (vi)(M < 4 ? _mm512_add_epi32(a, b) : a);
  }
}
#elif defined(__AVX2__)
template <int M>
NARU_INLINE void group_dots(const uint8_t* q, const int8_t* x, vi* out) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i w[8];
  for (int j = 0; j < 4; ++j) {
    const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(q + j * 64));
    w[j] = _mm256_and_si256(b, low);
    w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
  }
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    // A pair is at most 2 * 15 * 127 = 3810 and eight of them 30480: no saturation in 16 bits.
    __m256i a = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
      int32_t four;
      memcpy(&four, row + j * 4, 4);
      a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(four)));
    }
    out[m] = (vi)_mm256_madd_epi16(a, ones);
  }
}
#else
template <int M>
NARU_INLINE void group_dots(const uint8_t* q, const int8_t* x, vi* out) {
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    for (int lane = 0; lane < kLanes; ++lane) {
      int32_t sum = 0;
      for (int c = 0; c < 16; ++c) {
        const int byte = q[(c / 4) * 64 + lane * 4 + c % 4];
        sum += (byte & 15) * row[c] + (byte >> 4) * row[16 + c];
      }
      out[m][lane] = sum;
    }
  }
}
#endif

template <int F, int M>
void panel(const uint8_t* panel, int k, const QRows& x, const uint8_t* ahead, float* y) {
  constexpr Unit u = unit_of(F);
  const int groups = k / kGroup;
  for (int part = 0; part < kParts; ++part) {
    const int lane = part * kLanes;
    vf acc[M];
    for (int m = 0; m < M; ++m) acc[m] = vset(0.f);
    const uint8_t* unit = panel;
    for (int first = 0; first < groups; first += u.groups, unit += u.bytes) {
      for (int i = 0; i < u.groups && first + i < groups; ++i) {
        const int g = first + i;
        if (part == 0) fetch_ahead<F>(ahead, unit - panel, i);
        vi dots[M];
        group_dots<M>(unit + i * u.quants + lane * 4, x.q + g * kQStep, dots);
        vf d, mn;
        group_scales<F>(unit, i, lane, &d, &mn);
        for (int m = 0; m < M; ++m) {
          const GroupMeta& meta = x.meta[g * kTileRows + m];
          acc[m] = vfloat(dots[m]) * (d * vset(meta.scale)) + acc[m];
          acc[m] = mn * vset(meta.sum) + acc[m];
        }
      }
    }
    for (int m = 0; m < M; ++m) vstore(y + m * kPanel + lane, acc[m]);
  }
}

template <int F>
QPanel pick(int rows) {
  static const QPanel table[] = {panel<F, 1>, panel<F, 2>, panel<F, 3>, panel<F, 4>,
#if defined(__AVX512F__)
                                 panel<F, 5>, panel<F, 6>, panel<F, 7>, panel<F, 8>
#endif
  };
  return table[rows - 1];
}

}  // namespace

QPanel nibble_panel(int format, int rows) {
  if (format == kW4) return pick<kW4>(rows);
  if (format == kW4M) return pick<kW4M>(rows);
  return pick<kW4K>(rows);
}

}  // namespace naru
