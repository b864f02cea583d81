// Activations between operations: as floats, and quantized to bytes per token and group of 32 columns.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace naru {

// What a quantized dot product needs to know about one group of one token, beside the 32 bytes.
struct GroupMeta {
  float scale;      // x = scale * q
  float sum;        // scale * (q0 + .. + q31): multiplies the weights' minimum
  int32_t bias[2];  // -128 * sum of q over each half: takes the bias out of biased byte weights, exactly
};

// A matrix of activations, (rows, width). Either form may be absent (null).
struct Activations {
  int width = 0;
  float* f = nullptr;  // row stride `ld`
  size_t ld = 0;
  int8_t* q = nullptr;        // tiles of 16 rows x 32 columns: [row / 16][group][16][32]
  GroupMeta* meta = nullptr;  // [row / 16][group][16]
  bf16* h = nullptr;          // tiles of 16 rows x 32 columns: [row / 16][column / 32][16][32]
  // Which forms the producer writes.
  bool wants_f = false;
  bool wants_q = false;
};

constexpr int kTileRows = 16;

// Rounds row `row` to bf16 and puts it into the tiles at h; width is a multiple of 32.
void put_tile_row(const float* x, int width, int row, bf16* h);

// The forms that row `row` needs, from floats. tile_row >= 0: the quantized form is bf16, as that row of the tiles at h.
constexpr int kNoTileRow = -1;
void emit_row(const Activations& a, int row, const float* x, int tile_row);

// The same for `count` of its columns from `column` on, whole groups.
void emit_part(const Activations& a, int row, int column, int count, const float* x, int tile_row);

}  // namespace naru
