// Linear layers: out = x W^T (+ bias) (+ residual), all formats, any number of rows.
#pragma once

#include "activations.h"
#include "matrix.h"
#include "threads.h"

namespace naru {

// Quantized rows inside one tile of 16: row m of group g is at q + g * kQStep + m * kGroup, meta[g * kTileRows + m].
struct QRows {
  const int8_t* q;
  const GroupMeta* meta;
};
constexpr int kQStep = kTileRows * kGroup;

inline QRows rows_from(const Activations& x, int row) {
  const size_t tile = static_cast<size_t>(row / kTileRows) * (x.width / kGroup) * kTileRows;
  return QRows{x.q + (tile + row % kTileRows) * kGroup, x.meta + tile + row % kTileRows};
}

struct FRows {
  const float* x;
  size_t ld;
};

// Most rows that one call of a panel kernel takes; more rows mean fewer loads and unpackings of each weight, until the
// accumulators no longer fit the registers.
#if defined(__AVX512F__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif

// How far ahead of use a member asks for weights. Measured: one core reads 16 GB/s without asking, 28 GB/s at 16 KB; less
// leaves the latency of memory open, more pushes lines out of the L2 cache of a loaded machine.
constexpr size_t kAheadBytes = 16384;

// Asks for the share of group i of the unit at `offset`.
template <int F>
NARU_INLINE void fetch_ahead(const uint8_t* ahead, size_t offset, int i) {
  constexpr Unit u = unit_of(F);
  constexpr int lines = (u.bytes / u.groups + 63) / 64;
  for (int j = 0; j < lines; ++j) fetch_line(ahead + offset + (i * lines + j) * 64);
}

// y[m][16] = x[m] . panel rows, for 1 <= m <= kRows; meanwhile as many bytes as the panel has are fetched from `ahead`.
// The order of additions of one output does not depend on m, so that a token's result does not depend on its batch.
using QPanel = void (*)(const uint8_t* panel, int k, const QRows& x, const uint8_t* ahead, float* y);
using FPanel = void (*)(const uint8_t* panel, int k, const FRows& x, const uint8_t* ahead, float* y);

QPanel nibble_panel(int format, int rows);
QPanel byte_panel(int format, int rows);
FPanel float_panel(int format, int rows);

struct Linear {
  const Matrix* w;
  const Activations* x;
  int rows;
  float* out;
  size_t ld;
  bool add;              // out += instead of out =
  bool tiles;            // quantized weights meet bf16 activations in AMX tiles
  const Matrix* then;    // the next linear layer of the tape, fetched towards the end; may be null
  float* scratch;        // the member's own, 64-byte aligned: tile_scratch_floats(k)
  const Activations* gated = nullptr;  // in tiles: silu(first half of the columns) * second half goes here, not to out
};

// Adds bias and residual and stores a tile of rows x columns (at most 16) whose row stride is `ldy`.
inline void put_tile(const Linear& job, const float* y, int ldy, int row, int rows, int column, int columns) {
  float* out = job.out + static_cast<size_t>(row) * job.ld + column;
  const V16 bias = job.w->bias != nullptr ? load16(job.w->bias + column) : set16(0.f);
  for (int m = 0; m < rows; ++m, out += job.ld) {
    V16 v = load16(y + m * ldy) + bias;
    if (job.add) v = v + load16n(out, columns);
    store16n(out, v, columns);
  }
}

// All rows of one panel, on the vector unit; meanwhile as many bytes as the panel has are fetched from `ahead`.
void vector_panel(const Linear& job, const Segment& s, int index, const uint8_t* panel, const uint8_t* ahead);

// Inside a pool job, by all members; no barrier.
void linear(const Linear& job, Pool* pool, int member);

}  // namespace naru
