// From the blocks of a file to panels. Source of the block formats: the GGUF specification.
#include <cstring>

#include "matrix.h"

namespace naru {
namespace {

constexpr size_t kQ40 = 18, kQ41 = 20, kQ80 = 34, kQ4K = 144, kQ6K = 210;  // bytes of a block

template <typename T>
void pack_float(int k, const uint8_t* const* rows, uint8_t* panel) {
  T* out = reinterpret_cast<T*>(panel);
  // Sixteen columns at a time: each row gives one cache line, the tile stays in L1.
  for (int c0 = 0; c0 < k; c0 += 16) {
    const int c1 = c0 + 16 < k ? c0 + 16 : k;
    for (int r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr) continue;  // the arena is zeroed
      const T* in = reinterpret_cast<const T*>(rows[r]);
      for (int c = c0; c < c1; ++c) out[static_cast<size_t>(c) * kPanel + r] = in[c];
    }
  }
}

void put_half(uint8_t* section, int lane, const uint8_t* from) { memcpy(section + lane * 2, from, 2); }

// q4_0 and q4_1: a block's 16 bytes already hold columns i and i + 16 as low and high nibble, as the panel wants them.
void pack_q4(int format, int k, const uint8_t* const* rows, uint8_t* panel) {
  const bool has_min = format == kW4M;
  const size_t block = has_min ? kQ41 : kQ40;
  const Unit u = unit_of(format);
  for (int i = 0; i < k / kGroup; ++i) {
    uint8_t* unit = panel + static_cast<size_t>(i / u.groups) * u.bytes;
    const int g = i % u.groups;
    uint8_t* q = unit + g * u.quants;
    for (int r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr) continue;
      const uint8_t* b = rows[r] + i * block;
      put_half(unit + scale_at(format, g), r, b);
      if (has_min) put_half(unit + kW4MinAt, r, b + 2);
      const uint8_t* qs = b + (has_min ? 4 : 2);
      for (int j = 0; j < 4; ++j) memcpy(q + j * 64 + r * 4, qs + j * 4, 4);
    }
  }
}

void pack_q80(int k, const uint8_t* const* rows, uint8_t* panel) {
  constexpr Unit u = unit_of(kW8);
  for (int i = 0; i < k / kGroup; ++i) {
    uint8_t* unit = panel + static_cast<size_t>(i / u.groups) * u.bytes;
    const int g = i % u.groups;
    uint8_t* q = unit + g * u.quants;
    for (int r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr) continue;
      const uint8_t* b = rows[r] + i * kQ80;
      put_half(unit + scale_at(kW8, g), r, b);
      for (int j = 0; j < 8; ++j) {
        uint32_t four;
        memcpy(&four, b + 2 + j * 4, 4);
        four ^= 0x80808080u;  // signed to biased
        memcpy(q + j * 64 + r * 4, &four, 4);
      }
    }
  }
}

// The 6-bit scale and minimum of group g (0..7) of a q4_k block.
void q4k_scale(const uint8_t* scales, int g, uint8_t* sc, uint8_t* mn) {
  if (g < 4) {
    *sc = scales[g] & 63;
    *mn = scales[g + 4] & 63;
  } else {
    *sc = static_cast<uint8_t>((scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4);
    *mn = static_cast<uint8_t>((scales[g + 4] >> 4) | (scales[g] >> 6) << 4);
  }
}

void pack_q4k(int k, const uint8_t* const* rows, uint8_t* panel) {
  constexpr Unit u = unit_of(kW4K);
  for (int b = 0; b < k / 256; ++b) {
    for (int r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr) continue;
      const uint8_t* block = rows[r] + b * kQ4K;
      uint8_t* unit = panel + static_cast<size_t>(b) * u.bytes;
      put_half(unit + kW4KSuperAt, r, block);
      put_half(unit + kW4KSuperAt + 32, r, block + 2);
      for (int i = 0; i < 8; ++i) {
        q4k_scale(block + 4, i, unit + scale_at(kW4K, i) + r, unit + kW4KMinAt + i * 16 + r);
        // Groups 2j and 2j + 1 share 32 bytes: low and high nibbles.
        const uint8_t* qs = block + 16 + (i / 2) * 32;
        const int shift = (i % 2) * 4;
        uint8_t* q = unit + i * u.quants + r * 4;
        for (int c = 0; c < 16; ++c) {
          const int low = (qs[c] >> shift) & 15, high = (qs[c + 16] >> shift) & 15;
          q[(c / 4) * 64 + c % 4] = static_cast<uint8_t>(low | high << 4);
        }
      }
    }
  }
}

void pack_q6k(int k, const uint8_t* const* rows, uint8_t* panel) {
  constexpr Unit u = unit_of(kW6K);
  for (int b = 0; b < k / 256; ++b) {
    for (int r = 0; r < kPanel; ++r) {
      if (rows[r] == nullptr) continue;
      const uint8_t* ql = rows[r] + b * kQ6K;
      const uint8_t* qh = ql + 128;
      const uint8_t* sc = ql + 192;
      uint8_t* unit = panel + static_cast<size_t>(b) * u.bytes;
      put_half(unit + kW6KSuperAt, r, ql + 208);
      for (int g = 0; g < 16; ++g) unit[scale_at(kW6K, g / 2) + g % 2 * kPanel + r] = sc[g];
      uint8_t* q = unit + r * 4;
      for (int c = 0; c < 256; ++c) {
        // Column c lies in half c/128; within it, quarter c/32%4 takes 4 bits of ql and 2 bits of qh.
        const int half = c / 128, quarter = c / 32 % 4, i = c % 32;
        const int low = ql[half * 64 + (quarter % 2) * 32 + i] >> (quarter / 2 * 4) & 15;
        const int high = qh[half * 32 + i] >> (quarter * 2) & 3;
        q[(c / 4) * 64 + c % 4] = static_cast<uint8_t>((low | high << 4) - 32 + 128);
      }
    }
  }
}

}  // namespace

size_t file_row_bytes(int format, int k) {
  const size_t c = static_cast<size_t>(k);
  switch (format) {
    case kF32:
      return c * 4;
    case kF16:
    case kBF16:
      return c * 2;
    case kW4:
      return c / 32 * kQ40;
    case kW4M:
      return c / 32 * kQ41;
    case kW8:
      return c / 32 * kQ80;
    case kW4K:
      return c / 256 * kQ4K;
    default:
      return c / 256 * kQ6K;
  }
}

void pack_panels(const Segment& s, int k, const uint8_t* file, int begin, int end) {
  const size_t stride = file_row_bytes(s.format, k);
  for (int p = begin; p < end; ++p) {
    const uint8_t* rows[kPanel];
    for (int r = 0; r < kPanel; ++r) {
      const int row = p * kPanel + r;
      rows[r] = row < s.rows ? file + static_cast<size_t>(row) * stride : nullptr;
    }
    uint8_t* panel = s.data + static_cast<size_t>(p) * s.panel_bytes;
    switch (s.format) {
      case kF32:
        pack_float<uint32_t>(k, rows, panel);
        break;
      case kF16:
      case kBF16:
        pack_float<uint16_t>(k, rows, panel);
        break;
      case kW4:
      case kW4M:
        pack_q4(s.format, k, rows, panel);
        break;
      case kW8:
        pack_q80(k, rows, panel);
        break;
      case kW4K:
        pack_q4k(k, rows, panel);
        break;
      case kW6K:
        pack_q6k(k, rows, panel);
        break;
    }
  }
}

}  // namespace naru
