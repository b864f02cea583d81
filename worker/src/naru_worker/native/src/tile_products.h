// Products of 32 rows and two panels in bf16 tiles. Between their steps the vector unit, which would be idle, unpacks the
// weights that come next and gates sums of before.
#pragma once

#include "gemm.h"
#include "tile_gate.h"
#include "tile_unpack.h"

#if defined(__AMX_TILE__)

namespace naru {

constexpr int kTile = kTileRows;  // rows of activations, columns of output
constexpr int kSide = 2 * kTile;  // rows and columns of the four tiles that accumulate

// Unpacks one block of columns of a pair of panels slice by slice: [group][panel][512].
struct Unpacking {
  const uint8_t* panels[2] = {nullptr, nullptr};
  int count = 0;  // panels
  int begin = 0;  // group
  int done = 0, total = 0;
  uint16_t* out = nullptr;
  size_t ahead = 0;  // bytes from a panel to the one that is unpacked next but one block

  int left() const { return total - done; }

  template <int F>
  NARU_INLINE void one() {
    constexpr Unit u = unit_of(F);
    const int tile = done / kSlices;
    const int i = count == 2 ? tile & 1 : 0, g = begin + (count == 2 ? tile >> 1 : tile);
    const uint8_t* unit = panels[i] + static_cast<size_t>(g / u.groups) * u.bytes;
    const uint8_t* coming = unit + ahead + g % u.groups * (u.bytes / u.groups) + done % kSlices * 64;
    fetch_line(coming);
    if (u.bytes / u.groups > 256) fetch_line(coming + 256);
    unpack_slice<F>(unit, g % u.groups, done % kSlices, out + static_cast<size_t>(tile) * 512);
    ++done;
  }
  template <int F>
  void some(int slices) {
    for (; slices > 0; --slices) one<F>();
  }
};

// Where sums lie: four tiles, in memory with this stride.
struct Sums {
  float* at;
  size_t stride;  // floats
};

NARU_INLINE void load_sums(const Sums& s) {
  const size_t bytes = s.stride * sizeof(float);
  float* below = s.at + kTile * s.stride;
  _tile_loadd(0, s.at, bytes);
  _tile_loadd(1, s.at + kTile, bytes);
  _tile_loadd(2, below, bytes);
  _tile_loadd(3, below + kTile, bytes);
}

NARU_INLINE void store_sums(const Sums& s) {
  const size_t bytes = s.stride * sizeof(float);
  float* below = s.at + kTile * s.stride;
  _tile_stored(0, s.at, bytes);
  _tile_stored(1, s.at + kTile, bytes);
  _tile_stored(2, below, bytes);
  _tile_stored(3, below + kTile, bytes);
}

NARU_INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Asks for a line to be written.
NARU_INLINE void own_line(const char* p) { __builtin_prefetch(p, 1, 3); }

// Tiles 0..3 += 32 rows times a pair of panels. 4 and 5 are activations, passed by the L1 cache; 6 and 7 weights.
// Meanwhile `quota` slices of weights of format F are unpacked, earlier sums are gated, and lines of `next` are made ready
// to be written.
template <int F>
void multiply_pair(const bf16* a, size_t tile_row, const uint16_t* b, int steps, const Sums& next, int quota,
                   Unpacking* unpacking, Gating* gating) {
  Unpacking u = *unpacking;
  Gating gate = *gating;
  for (; quota > steps; --quota) u.one<F>();
  int due = 0;
  const char* line = reinterpret_cast<const char*>(next.at);
  const size_t stride = next.stride * sizeof(float);
  for (int t = 0; t < steps; ++t, a += 512, b += 1024) {
    _tile_stream_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(5, a + tile_row, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if (t < kTile) {
      own_line(line);
      own_line(line + 64);
      own_line(line + stride);
      own_line(line + stride + 64);
      line += 2 * stride;
    }
    if (gate.done + 1 < gate.rows) {
      gate.one();
      gate.one();
    }
    due += quota;
    if (due >= steps) {
      due -= steps;
      u.one<F>();
    }
  }
  unpacking->done = u.done;
  gating->done = gate.done;
}

// The same by one panel; tiles 1 and 3 stay what they are.
inline void multiply_one(const bf16* a, size_t tile_row, const uint16_t* b, int steps) {
  for (int t = 0; t < steps; ++t, a += 512, b += 512) {
    _tile_stream_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_stream_loadd(5, a + tile_row, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
  }
}

// What is made for a format.
struct TileKernels {
  decltype(&multiply_pair<kW4>) multiply;
  void (Unpacking::*unpack)(int slices);
};

template <int F>
constexpr TileKernels tile_kernels() {
  return TileKernels{multiply_pair<F>, &Unpacking::some<F>};
}

inline TileKernels tile_kernels_of(int format) {
  switch (format) {
    case kW4:
      return tile_kernels<kW4>();
    case kW4M:
      return tile_kernels<kW4M>();
    case kW8:
      return tile_kernels<kW8>();
    case kW4K:
      return tile_kernels<kW4K>();
    default:
      return tile_kernels<kW6K>();
  }
}

}  // namespace naru

#endif
