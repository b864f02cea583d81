// Sixteen float lanes, whatever the machine: one 512-bit, two 256-bit or four 128-bit registers.
//
// Every float kernel is written once against V16; only integer dot products and tile code use intrinsics. GCC's vector
// extensions are used instead of a wrapper per ISA: with -mfma, a*b+c on them becomes a fused multiply-add.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace naru {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPanel = 16;  // rows of a weight panel, lanes of V16
constexpr int kParts = kPanel / kLanes;

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef float vfu __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t viu __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int8_t vbu __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint16_t vhu __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

#define NARU_INLINE inline __attribute__((always_inline))

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Asks for the cache line at p, into L2: many of these may be under way at once.
NARU_INLINE void fetch_line(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

struct V16 {
  vf v[kParts];
};

NARU_INLINE vf vset(float x) { return x - (vf){}; }
NARU_INLINE vi viset(int32_t x) { return x - (vi){}; }

NARU_INLINE V16 set16(float x) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = vset(x);
  return r;
}

NARU_INLINE V16 load16(const float* p) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = *reinterpret_cast<const vfu*>(p + i * kLanes);
  return r;
}

NARU_INLINE void store16(float* p, const V16& a) {
  for (int i = 0; i < kParts; ++i) *reinterpret_cast<vfu*>(p + i * kLanes) = a.v[i];
}

// Stores the first n lanes, n in [0, 16].
NARU_INLINE void store16n(float* p, const V16& a, int n) {
  if (n >= kPanel) return store16(p, a);
  alignas(64) float t[kPanel];
  store16(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

NARU_INLINE V16 load16n(const float* p, int n) {
  if (n >= kPanel) return load16(p);
  alignas(64) float t[kPanel] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load16(t);
}

// a * b + c
NARU_INLINE V16 fma16(const V16& a, const V16& b, const V16& c) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}

NARU_INLINE V16 operator*(const V16& a, const V16& b) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] * b.v[i];
  return r;
}

NARU_INLINE V16 operator+(const V16& a, const V16& b) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] + b.v[i];
  return r;
}

NARU_INLINE V16 operator-(const V16& a, const V16& b) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] - b.v[i];
  return r;
}

NARU_INLINE V16 operator/(const V16& a, const V16& b) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] / b.v[i];
  return r;
}

NARU_INLINE V16 max16(const V16& a, const V16& b) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}

NARU_INLINE V16 abs16(const V16& a) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = (vf)((vi)a.v[i] & viset(0x7fffffff));
  return r;
}

NARU_INLINE float hsum16(const V16& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)a.v[0]);
#elif defined(__AVX2__)
  const __m256 s = (__m256)(a.v[0] + a.v[1]);
  const __m128 four = _mm256_castps256_ps128(s) + _mm256_extractf128_ps(s, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
#else
  vf s = a.v[0];
  for (int i = 1; i < kParts; ++i) s = s + a.v[i];
  float r = 0.f;
  for (int i = 0; i < kLanes; ++i) r += s[i];
  return r;
#endif
}

NARU_INLINE float hmax16(const V16& a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a.v[0]);
#elif defined(__AVX2__)
  const __m256 s = _mm256_max_ps((__m256)a.v[0], (__m256)a.v[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return two[0] > two[1] ? two[0] : two[1];
#else
  vf s = a.v[0];
  for (int i = 1; i < kParts; ++i) s = a.v[i] > s ? a.v[i] : s;
  float r = s[0];
  for (int i = 1; i < kLanes; ++i) r = s[i] > r ? s[i] : r;
  return r;
#endif
}

// ---- half precision -------------------------------------------------------------------------------------------------

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

NARU_INLINE float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

NARU_INLINE uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

NARU_INLINE float to_float(float x) { return x; }
NARU_INLINE float to_float(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

NARU_INLINE float to_float(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t mag = x.bits & 0x7fffu;
  if (mag >= 0x7c00u) return bits_float(sign | 0x7f800000u | (mag & 0x3ffu) << 13);  // inf, nan
  if (mag >= 0x400u) return bits_float(sign | ((mag << 13) + 0x38000000u));
  // Subnormal halves are multiples of 2^-24, all of them normal floats.
  const float f = static_cast<float>(mag) * 5.9604644775390625e-8f;
  return sign ? -f : f;
#endif
}

NARU_INLINE f16 to_f16(float x) {
#if defined(__F16C__)
  return f16{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return f16{static_cast<uint16_t>(sign | 0x7e00u)};
  if (mag >= 0x477ff000u) return f16{static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (mag < 0x38800000u) {
    // Below the smallest normal half: adding 0.5 lets the FPU round to the 2^-24 grid.
    const float t = bits_float(mag) + 0.5f;
    return f16{static_cast<uint16_t>(sign | (float_bits(t) - 0x3f000000u))};
  }
  const uint32_t odd = (mag >> 13) & 1u;
  return f16{static_cast<uint16_t>(sign | ((mag + 0xfffu + odd - 0x38000000u) >> 13))};
#endif
}

NARU_INLINE bf16 to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

NARU_INLINE V16 load16(const f16* p) {
  V16 r;
#if defined(__AVX512F__)
  r.v[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  for (int i = 0; i < kParts; ++i)
    r.v[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * kLanes)));
#else
  for (int i = 0; i < kParts; ++i)
    for (int j = 0; j < kLanes; ++j) r.v[i][j] = to_float(p[i * kLanes + j]);
#endif
  return r;
}

NARU_INLINE V16 load16(const bf16* p) {
  V16 r;
  for (int i = 0; i < kParts; ++i)
    r.v[i] = (vf)(__builtin_convertvector(*reinterpret_cast<const vhu*>(p + i * kLanes), vi) << 16);
  return r;
}

NARU_INLINE void store16(f16* p, const V16& a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)a.v[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  for (int i = 0; i < kParts; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * kLanes),
                     _mm256_cvtps_ph((__m256)a.v[i], _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kParts; ++i)
    for (int j = 0; j < kLanes; ++j) p[i * kLanes + j] = to_f16(a.v[i][j]);
#endif
}

// Rounds to nearest even; NaN is not preserved (activations never carry one that matters).
NARU_INLINE void store16(bf16* p, const V16& a) {
  for (int i = 0; i < kParts; ++i) {
    const vi u = (vi)a.v[i];
    const vi r = (u + viset(0x7fff) + ((u >> 16) & viset(1))) >> 16;
    *reinterpret_cast<vhu*>(p + i * kLanes) = __builtin_convertvector(r, vhu);
  }
}

// kLanes signed or unsigned bytes to integers. GCC takes a conversion of vectors apart byte by byte.
NARU_INLINE vi vwiden(const int8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const vbu*>(p), vi);
#endif
}

NARU_INLINE vi vwiden(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const vbu*>(p), vi) & viset(0xff);
#endif
}

// Sixteen signed or unsigned bytes to floats.
template <typename Byte, typename = decltype(vwiden(static_cast<const Byte*>(nullptr)))>
NARU_INLINE V16 load16(const Byte* p) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = __builtin_convertvector(vwiden(p + i * kLanes), vf);
  return r;
}

// ---- one register at a time: kernels that keep many accumulators ------------------------------------------------------

NARU_INLINE vf vload(const float* p) { return *reinterpret_cast<const vfu*>(p); }
NARU_INLINE vf vload(const bf16* p) {
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vhu*>(p), vi) << 16);
}
NARU_INLINE vf vload(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf r;
  for (int j = 0; j < kLanes; ++j) r[j] = to_float(p[j]);
  return r;
#endif
}
NARU_INLINE vf vload(const int8_t* p) { return __builtin_convertvector(vwiden(p), vf); }
NARU_INLINE vf vload(const uint8_t* p) { return __builtin_convertvector(vwiden(p), vf); }
NARU_INLINE void vstore(float* p, vf a) { *reinterpret_cast<vfu*>(p) = a; }
NARU_INLINE vf vfloat(vi a) { return __builtin_convertvector(a, vf); }

// ---- elementary functions -------------------------------------------------------------------------------------------

// e^x with about 1 ulp; saturates outside [-87.3, 88.3].
NARU_INLINE vf vexp(vf x) {
  const vf lo = vset(-87.3f), hi = vset(88.3f);
  x = x > lo ? x : lo;
  x = x < hi ? x : hi;
  // Adding 1.5 * 2^23 rounds to an integer that also sits in the low mantissa bits, ready to become an exponent.
  const vf magic = vset(12582912.f);
  const vf t = x * vset(1.44269504088896341f) + magic;
  const vf n = t - magic;
  vf r = n * vset(-0.693359375f) + x;
  r = n * vset(2.12194440e-4f) + r;
  vf p = vset(1.9875691500e-4f);
  p = p * r + vset(1.3981999507e-3f);
  p = p * r + vset(8.3334519073e-3f);
  p = p * r + vset(4.1665795894e-2f);
  p = p * r + vset(1.6666665459e-1f);
  p = p * r + vset(5.0000001201e-1f);
  p = p * (r * r) + r;
  p = p + vset(1.f);
  return (vf)((vi)p + ((vi)t << 23));
}

NARU_INLINE V16 exp16(const V16& a) {
  V16 r;
  for (int i = 0; i < kParts; ++i) r.v[i] = vexp(a.v[i]);
  return r;
}

}  // namespace naru
