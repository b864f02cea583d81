// An encoder's products in float32, by the kernels that the decoder's float weights have.
#include "encoder_math.h"

namespace naru {

#if !defined(__AMX_TILE__)

namespace {

V16 activate(const V16& x, int kind) {
  if (kind == kEncoderRelu) return max16(x, set16(0.f));
  if (kind == kEncoderGeluTanh) {
    // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
    const V16 u = set16(0.7978845608028654f) * fma16(set16(0.044715f), x * x * x, x);
    return x / (set16(1.f) + exp16(set16(-2.f) * u));
  }
  // 0.5 x (1 + erf(x / sqrt 2)), erf to 1.5e-7. Source: Abramowitz and Stegun, 7.1.26.
  const V16 z = abs16(x) * set16(0.70710678118654752f);
  const V16 t = set16(1.f) / fma16(set16(0.3275911f), z, set16(1.f));
  V16 p = set16(1.061405429f);
  p = fma16(p, t, set16(-1.453152027f));
  p = fma16(p, t, set16(1.421413741f));
  p = fma16(p, t, set16(-0.284496736f));
  p = fma16(p, t, set16(0.254829592f));
  // 1 - erf(|z|), half of which is the share that x loses, or keeps where it is negative.
  const V16 tail = set16(0.5f) * p * t * exp16(set16(0.f) - z * z);
  return max16(x, set16(0.f)) - abs16(x) * tail;
}

}  // namespace

void begin_products() {}
void end_products() {}

void put_left(const Left& to, int row, const float* x) {
  const size_t ld = static_cast<size_t>(padded(to.width));
  memcpy(to.data + static_cast<size_t>(row) * ld, x, ld * sizeof(float));
}

void clear_padding(const Left&, int) {}

size_t weight_elements(int n, int k) { return segment_bytes(kF32, n, k) / sizeof(float); }

void pack_weight(const Weight& w, const float* rows) {
  Segment s;
  s.format = kF32;
  s.rows = w.n;
  s.panel_bytes = panel_bytes(kF32, w.k);
  s.data = reinterpret_cast<uint8_t*>(w.data);
  pack_panels(s, w.k, reinterpret_cast<const uint8_t*>(rows), 0, (w.n + kPanel - 1) / kPanel);
}

void pack_table(const Table& t, const float* rows) {
  memcpy(t.data, rows, static_cast<size_t>(t.rows) * static_cast<size_t>(t.width) * sizeof(float));
}

void multiply(const Product& job, Crew* crew) {
  const Weight& w = *job.w;
  const size_t x_ld = static_cast<size_t>(padded(job.x.width));
  float* out = job.then == Then::kRows ? job.rows_out : job.then == Then::kAdd ? job.out : job.left.data;
  const size_t ld = job.then == Then::kAct ? static_cast<size_t>(padded(job.left.width)) : job.ld;
  const int panels = (w.n + kPanel - 1) / kPanel;
  alignas(64) float y[kRows * kPanel];
  crew->begin(panels);
  for (int p = crew->next(); p >= 0; p = crew->next()) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(w.data) + static_cast<size_t>(p) * panel_bytes(kF32, w.k);
    // Bytes that lie behind the last panel are fetched in vain, and never read.
    const uint8_t* ahead = panel + static_cast<size_t>(crew->size) * panel_bytes(kF32, w.k);
    const int column = p * kPanel, left = w.n - column;
    const V16 bias = load16(w.bias + column);
    for (int row = 0; row < job.rows; row += kRows) {
      const int count = job.rows - row < kRows ? job.rows - row : kRows;
      float_panel(kF32, count)(panel, w.k, FRows{job.x.data + static_cast<size_t>(row) * x_ld, x_ld}, ahead, y);
      ahead = panel;
      for (int m = 0; m < count; ++m) {
        const size_t at = static_cast<size_t>(row + m) * ld + static_cast<size_t>(column);
        V16 v = load16(y + m * kPanel) + bias;
        if (job.then == Then::kAdd) v = v + load16n(job.residual + at, left);
        if (job.then == Then::kAct) v = activate(v, job.act);
        store16n(out + at, v, left);
      }
    }
  }
  crew->barrier();
}

size_t attend_floats(int rows, int head_dim) {
  const size_t l = static_cast<size_t>(round_up(rows, kPanel)), d = static_cast<size_t>(round_up(head_dim, kPanel));
  return 2 * l * d + kRows * l + kRows * kPanel + 64;
}

namespace {

// One row of scores to weights; the rest of the last register becomes 0.
float soften(float* s, int n, float scale) {
  V16 best = set16(-1e30f);
  int c = 0;
  for (; c + kPanel <= n; c += kPanel) best = max16(load16(s + c), best);
  float top = hmax16(best);
  for (; c < n; ++c) top = s[c] > top ? s[c] : top;
  const V16 by = set16(scale), shift = set16(-top * scale);
  V16 sum = set16(0.f);
  for (c = 0; c < n; c += kPanel) {
    if (c + kPanel > n)
      for (int i = n; i < c + kPanel; ++i) s[i] = -1e30f;
    const V16 w = exp16(fma16(load16(s + c), by, shift));
    store16(s + c, w);
    sum = sum + w;
  }
  for (int i = n; i < c; ++i) s[i] = 0.f;
  return hsum16(sum);
}

}  // namespace

void attend(const Heads& job, int first, int rows, int head, float* scratch) {
  const int d = job.head_dim, dp = round_up(d, kPanel), lp = round_up(rows, kPanel);
  float* keys = scratch;                                     // [key / 16][d][16]
  float* values = keys + static_cast<size_t>(lp) * dp;       // [dim / 16][rows][16]
  float* scores = values + static_cast<size_t>(lp) * dp;     // [kRows][lp]
  float* y = scores + static_cast<size_t>(kRows) * lp;
  const size_t hidden = static_cast<size_t>(job.num_heads) * d;
  const Element* q = job.qkv + static_cast<size_t>(first) * job.ld + static_cast<size_t>(head) * d;
  for (int r = 0; r < lp; ++r) {
    const float* row = q + static_cast<size_t>(r < rows ? r : 0) * job.ld;
    float* k = keys + static_cast<size_t>(r / kPanel) * d * kPanel + r % kPanel;
    for (int c = 0; c < d; ++c) k[static_cast<size_t>(c) * kPanel] = r < rows ? row[hidden + c] : 0.f;
    if (r >= rows) continue;
    for (int c = 0; c < dp; c += kPanel)
      store16(values + (static_cast<size_t>(c / kPanel) * rows + r) * kPanel, load16n(row + 2 * hidden + c, d - c));
  }
  const size_t out_ld = static_cast<size_t>(padded(job.out.width));
  for (int row = 0; row < rows; row += kRows) {
    const int count = rows - row < kRows ? rows - row : kRows;
    const FPanel multiply_panel = float_panel(kF32, count);
    for (int key = 0; key < lp; key += kPanel) {
      const uint8_t* panel = reinterpret_cast<const uint8_t*>(keys + static_cast<size_t>(key) * d);
      multiply_panel(panel, d, FRows{q + static_cast<size_t>(row) * job.ld, job.ld}, panel, y);
      for (int m = 0; m < count; ++m) store16(scores + static_cast<size_t>(m) * lp + key, load16(y + m * kPanel));
    }
    float inverse[kRows];
    for (int m = 0; m < count; ++m) {
      const float sum = soften(scores + static_cast<size_t>(m) * lp, rows, job.scale);
      inverse[m] = sum > 0.f ? 1.f / sum : 0.f;
    }
    for (int c = 0; c < dp; c += kPanel) {
      const uint8_t* panel = reinterpret_cast<const uint8_t*>(values + static_cast<size_t>(c) * rows);
      multiply_panel(panel, rows, FRows{scores, static_cast<size_t>(lp)}, panel, y);
      for (int m = 0; m < count; ++m)
        store16n(job.out.data + static_cast<size_t>(first + row + m) * out_ld + static_cast<size_t>(head) * d + c,
                 load16(y + m * kPanel) * set16(inverse[m]), d - c);
    }
  }
}

#endif

}  // namespace naru
