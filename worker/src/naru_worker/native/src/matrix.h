// Linear weights as they lie in memory.
//
// A matrix is a list of segments (one per part of a stack); a segment is a list of panels of 16 output rows. In a panel
// the 16 rows are interleaved, so that one register holds the same columns of 16 rows and a dot product needs no
// horizontal sum:
//
//   floats   [column][16 rows]
//   bytes    [column / 4][16 rows][4 columns]           (one 512-bit load = operand of one byte dot product)
//   nibbles  per group of 32 columns [4][16 rows][4]:   byte j, row r, c = column 4j + c (low), column 16 + 4j + c (high)
//
// A quantized panel is a sequence of units: the quants of a few groups, then their scales, [group][16 rows]. A unit is
// whole cache lines, so a panel is one stream that is read once from front to back. The layout is the same for every ISA.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace naru {

// Formats in memory. The first seven numbers are also those of the files' tensors; see `FileFormat`.
enum Format : int32_t {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kW4 = 3,   // nibbles, w = d (q - 8)
  kW4M = 4,  // nibbles, w = d q + m
  kW8 = 5,   // bytes biased by 128, w = d (q - 128)
  kW4K = 6,  // nibbles, w = (D sc) q - (M mn), D and M per 256 columns, sc and mn bytes per 32
  kW6K = 7,  // bytes biased by 128, w = (D sc) (q - 128), D per 256 columns, sc signed byte per 16
};

// File formats in the order of the Python side's table; equal to the format in memory.
// f32 f16 bf16 q4_0 q4_1 q8_0 q4_k q6_k

constexpr int kGroup = 32;  // columns that share a scale, and the activations' group too

inline bool is_quantized(int format) { return format >= kW4; }

// Bytes of a unit's sections for one group, and how many groups a unit has.
//
//   kW4   2 groups: 2 x 256 quants, 2 x f16 [16] d
//   kW4M  1 group:      256 quants, f16 [16] d, f16 [16] m
//   kW8   2 groups: 2 x 512 quants, 2 x f16 [16] d
//   kW4K  8 groups: 8 x 256 quants, 8 x u8 [16] sc, 8 x u8 [16] mn, f16 [16] D, f16 [16] M
//   kW6K  8 groups: 8 x 512 quants, 8 x s8 [2][16] sc, f16 [16] D
struct Unit {
  int groups;
  int quants;  // bytes of one group's quants
  int bytes;   // of the whole unit
};

constexpr Unit unit_of(int format) {
  return format == kW4    ? Unit{2, 256, 576}
         : format == kW4M ? Unit{1, 256, 320}
         : format == kW8  ? Unit{2, 512, 1088}
         : format == kW4K ? Unit{8, 256, 8 * 288 + 64}
                          : Unit{8, 512, 8 * 544 + 64};  // 32 bytes of padding at the end
}

// Where group g's scales start, for each kind.
constexpr int scale_at(int format, int g) {
  const Unit u = unit_of(format);
  return u.groups * u.quants + g * (format == kW4K ? 16 : 32);
}
constexpr int kW4MinAt = 256 + 32;                    // kW4M: m
constexpr int kW4KMinAt = 8 * 256 + 8 * 16;           // kW4K: mn of group 0
constexpr int kW4KSuperAt = 8 * 256 + 2 * 8 * 16;     // kW4K: D, then M
constexpr int kW6KSuperAt = 8 * 512 + 8 * 32;         // kW6K: D

// Bytes of one panel.
size_t panel_bytes(int format, int k);

struct Segment {
  int format = 0;
  int rows = 0;       // without padding
  int first_row = 0;  // output column of the segment's row 0
  int panels = 0;
  int first_panel = 0;
  size_t panel_bytes = 0;
  uint8_t* data = nullptr;
};

constexpr int kMaxSegments = 8;

struct Matrix {
  int n = 0;  // output features
  int k = 0;
  int panels = 0;
  int num_segments = 0;
  Segment segments[kMaxSegments];
  float* bias = nullptr;  // (n and 16 more), or null
  uint64_t end = 0;       // where its last byte ends in an image; 0: it lies in no image
  bool wants_float = false;
  bool wants_quant = false;
};

// One row of a matrix as floats: embedding lookup.
void matrix_row(const Matrix& w, int row, float* out);

// Bytes that one segment takes.
size_t segment_bytes(int format, int rows, int k);

// Bytes of one row of k columns in the file.
size_t file_row_bytes(int format, int k);

// Packs panels [begin, end) of a segment from `rows` file rows at `file`.
void pack_panels(const Segment& s, int k, const uint8_t* file, int begin, int end);

}  // namespace naru
