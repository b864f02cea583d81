// Dot products of byte weights with byte activations.
#include "gemm.h"
#include "scales.h"

namespace naru {
namespace {

// Integer dot products of sixteen columns, weights unbiased: out[m] = sum (q - 128) * x, exact.
#if defined(__AVX512F__)
template <int M>
NARU_INLINE void half_dots(const uint8_t* q, const int8_t* x, const GroupMeta* meta, int half, vi* out) {
  __m512i w[4];
  for (int j = 0; j < 4; ++j) w[j] = _mm512_load_si512(q + j * 64);
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    __m512i a = _mm512_set1_epi32(meta[m].bias[half]);
    for (int j = 0; j < 4; ++j) {
      int32_t four;
      memcpy(&four, row + j * 4, 4);
      a = _mm512_dpbusd_epi32(a, w[j], _mm512_set1_epi32(four));
    }
    out[m] = (vi)a;
  }
}
#elif defined(__AVX2__)
template <int M>
NARU_INLINE void half_dots(const uint8_t* q, const int8_t* x, const GroupMeta*, int, vi* out) {
  const __m256i bias = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  __m256i w[4], size[4];
  for (int j = 0; j < 4; ++j) {
    const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(q + j * 64));
    w[j] = _mm256_xor_si256(b, bias);
    size[j] = _mm256_abs_epi8(w[j]);
  }
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    __m256i a = _mm256_setzero_si256();
    for (int j = 0; j < 4; ++j) {
      int32_t four;
      memcpy(&four, row + j * 4, 4);
      // |w| <= 128 and |x| <= 127: a pair is at most 32512, no saturation; two pairs would be too many.
      const __m256i pairs = _mm256_maddubs_epi16(size[j], _mm256_sign_epi8(_mm256_set1_epi32(four), w[j]));
      a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs, ones));
    }
    out[m] = (vi)a;
  }
}
#else
template <int M>
NARU_INLINE void half_dots(const uint8_t* q, const int8_t* x, const GroupMeta*, int, vi* out) {
  for (int m = 0; m < M; ++m) {
    const int8_t* row = x + m * kGroup;
    for (int lane = 0; lane < kLanes; ++lane) {
      int32_t sum = 0;
      for (int c = 0; c < 16; ++c) sum += (q[(c / 4) * 64 + lane * 4 + c % 4] - 128) * row[c];
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
        const uint8_t* q = unit + i * u.quants + lane * 4;
        const GroupMeta* meta = x.meta + g * kTileRows;
        vi a[M], b[M];
        half_dots<M>(q, x.q + g * kQStep, meta, 0, a);
        half_dots<M>(q + 256, x.q + g * kQStep + 16, meta, 1, b);
        if (F == kW8) {
          const vf d = vload(reinterpret_cast<const f16*>(unit + scale_at(F, i)) + lane);
          for (int m = 0; m < M; ++m)
            acc[m] = vfloat(a[m] + b[m]) * (d * vset(meta[m].scale)) + acc[m];
        } else {
          vf d0, d1;
          half_scales(unit, i, lane, &d0, &d1);
          for (int m = 0; m < M; ++m) {
            const vf sx = vset(meta[m].scale);
            acc[m] = vfloat(a[m]) * (d0 * sx) + acc[m];
            acc[m] = vfloat(b[m]) * (d1 * sx) + acc[m];
          }
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

QPanel byte_panel(int format, int rows) { return format == kW8 ? pick<kW8>(rows) : pick<kW6K>(rows); }

}  // namespace naru
