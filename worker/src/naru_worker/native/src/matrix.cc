#include "matrix.h"

namespace naru {
namespace {

template <typename T>
void float_row(const uint8_t* panel, int lane, int k, float* out) {
  const T* p = reinterpret_cast<const T*>(panel) + lane;
  for (int c = 0; c < k; ++c) out[c] = to_float(p[static_cast<size_t>(c) * kPanel]);
}

float half_at(const uint8_t* section, int lane) { return to_float(reinterpret_cast<const f16*>(section)[lane]); }

void nibble_row(int format, const uint8_t* panel, int lane, int k, float* out) {
  const Unit u = unit_of(format);
  for (int i = 0; i < k / kGroup; ++i) {
    const uint8_t* unit = panel + static_cast<size_t>(i / u.groups) * u.bytes;
    const int g = i % u.groups;
    float d, m;
    if (format == kW4K) {
      d = half_at(unit + kW4KSuperAt, lane) * static_cast<float>(unit[scale_at(format, g) + lane]);
      m = -half_at(unit + kW4KSuperAt + 32, lane) * static_cast<float>(unit[kW4KMinAt + g * 16 + lane]);
    } else {
      d = half_at(unit + scale_at(format, g), lane);
      m = format == kW4M ? half_at(unit + kW4MinAt, lane) : -8.f * d;
    }
    const uint8_t* q = unit + g * u.quants;
    for (int c = 0; c < 16; ++c) {
      const uint8_t byte = q[(c / 4) * 64 + lane * 4 + c % 4];
      out[i * kGroup + c] = d * static_cast<float>(byte & 15) + m;
      out[i * kGroup + 16 + c] = d * static_cast<float>(byte >> 4) + m;
    }
  }
}

void byte_row(int format, const uint8_t* panel, int lane, int k, float* out) {
  const Unit u = unit_of(format);
  for (int c = 0; c < k; ++c) {
    const int i = c / kGroup, g = i % u.groups;
    const uint8_t* unit = panel + static_cast<size_t>(i / u.groups) * u.bytes;
    const uint8_t* scale = unit + scale_at(format, g);
    const float d = format == kW6K ? half_at(unit + kW6KSuperAt, lane) *
                                         static_cast<float>(static_cast<int8_t>(scale[c % kGroup / 16 * 16 + lane]))
                                   : half_at(scale, lane);
    const int q = unit[g * u.quants + (c % kGroup / 4) * 64 + lane * 4 + c % 4];
    out[c] = d * static_cast<float>(q - 128);
  }
}

}  // namespace

size_t panel_bytes(int format, int k) {
  const size_t columns = static_cast<size_t>(k);
  if (format == kF32) return columns * 64;
  if (!is_quantized(format)) return (columns * 32 + 63) & ~size_t{63};
  const Unit u = unit_of(format);
  return (columns / kGroup + u.groups - 1) / u.groups * u.bytes;
}

size_t segment_bytes(int format, int rows, int k) {
  return static_cast<size_t>((rows + kPanel - 1) / kPanel) * panel_bytes(format, k);
}

void matrix_row(const Matrix& w, int row, float* out) {
  const Segment* s = w.segments;
  while (row >= s->first_row + s->rows) ++s;
  const int r = row - s->first_row;
  const uint8_t* panel = s->data + static_cast<size_t>(r / kPanel) * s->panel_bytes;
  const int lane = r % kPanel;
  switch (s->format) {
    case kF32:
      return float_row<float>(panel, lane, w.k, out);
    case kF16:
      return float_row<f16>(panel, lane, w.k, out);
    case kBF16:
      return float_row<bf16>(panel, lane, w.k, out);
    case kW8:
    case kW6K:
      return byte_row(s->format, panel, lane, w.k, out);
    default:
      return nibble_row(s->format, panel, lane, w.k, out);
  }
}

}  // namespace naru
