#include "rowops.h"

#include <cmath>

#include "simd.h"

namespace naru {
namespace {

float sum_row(const float* x, int width) {
  V16 s = set16(0.f);
  int c = 0;
  for (; c + 16 <= width; c += 16) s = s + load16(x + c);
  if (c < width) s = s + load16n(x + c, width - c);
  return hsum16(s);
}

float sum_squares(const float* x, int width, float mean) {
  const V16 mu = set16(mean);
  // Four sums, so that one does not wait for the other.
  V16 s[4];
  for (V16& each : s) each = set16(0.f);
  int c = 0;
  for (; c + 64 <= width; c += 64) {
    for (int i = 0; i < 4; ++i) {
      const V16 d = load16(x + c + 16 * i) - mu;
      s[i] = fma16(d, d, s[i]);
    }
  }
  for (; c + 16 <= width; c += 16) {
    const V16 d = load16(x + c) - mu;
    s[0] = fma16(d, d, s[0]);
  }
  float r = hsum16((s[0] + s[1]) + (s[2] + s[3]));
  for (; c < width; ++c) r += (x[c] - mean) * (x[c] - mean);
  return r;
}

V16 silu(const V16& x) { return x / (set16(1.f) + exp16(set16(0.f) - x)); }

V16 gelu_tanh(const V16& x) {
  // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
  const V16 cube = x * x * x;
  const V16 u = set16(0.7978845608028654f) * fma16(set16(0.044715f), cube, x);
  return x / (set16(1.f) + exp16(set16(-2.f) * u));
}

V16 gelu_erf(const V16& x) {
  alignas(64) float t[kPanel];
  store16(t, x);
  for (int i = 0; i < kPanel; ++i) t[i] = 0.5f * t[i] * (1.f + erff(t[i] * 0.70710678118654752f));
  return load16(t);
}

V16 act16(const V16& a, int kind) { return kind == kGeluTanh ? gelu_tanh(a) : gelu_erf(a); }

}  // namespace

void norm_row(const float* x, int width, const float* weight, const float* bias, float eps, int kind, float* out) {
  const float n = static_cast<float>(width);
  const float mean = kind == kLayerNorm ? sum_row(x, width) / n : 0.f;
  const float inverse = 1.f / std::sqrt(sum_squares(x, width, mean) / n + eps);
  const V16 mu = set16(mean), inv = set16(inverse);
  int c = 0;
  if (kind == kRms && bias == nullptr)
    for (; c + 16 <= width; c += 16) store16(out + c, load16(x + c) * inv * load16(weight + c));
  for (; c < width; c += 16) {
    const int left = width - c;
    V16 v = (load16n(x + c, left) - mu) * inv * load16n(weight + c, left);
    if (bias != nullptr) v = v + load16n(bias + c, left);
    store16n(out + c, v, left);
  }
}

void act_row(const float* x, int width, int kind, float* out) {
  for (int c = 0; c < width; c += 16) {
    const int left = width - c;
    const V16 a = load16n(x + c, left);
    if (kind == kSwiglu)
      store16n(out + c, silu(a) * load16n(x + width + c, left), left);
    else
      store16n(out + c, act16(a, kind), left);
  }
}

}  // namespace naru
