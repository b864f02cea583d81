// Linear layers on AMX tiles: 16 x 16 outputs at a time.
//
// Two ways. For generated tokens, bytes: weights are unpacked to bytes, activations are the usual quantized ones, and each
// group's integer result is scaled, so the numbers are those of the other kernels, bit for bit. For prompt tokens, bf16:
// unpacking a panel to bf16 once costs little per row, and nothing needs scaling afterwards. What a token is decides, not
// how many there are: a result must not depend on the batch.
#pragma once

#include "gemm.h"
#include "gemm_unpacked.h"
#include "tiles.h"

namespace naru {

#if defined(__AMX_TILE__)

constexpr bool kHasTiles = true;
constexpr int kByteTileRows = 6;    // from this many rows on bytes beat the dot products of the vector unit
constexpr int kFloatTileRows = 40;  // from here on bf16 beats bytes: for one layer alone, where rows are of no kind

constexpr int kMaxTileRows = 512;   // most rows of one product by bf16

// Floats of scratch a member needs for matrices of up to k columns.
size_t tile_scratch_floats(int k);

// Whether the panel can go the way of bytes.
bool has_byte_tiles(int format);

// All rows of one panel, by bytes.
void byte_tile_panel(const Linear& job, const Segment& s, int index, const uint8_t* panel, const uint8_t* ahead);

// Inside a pool job, by all members: prompt tokens' rows, by bf16.
void linear_in_tiles(const Linear& job, Pool* pool, int member);

#else

constexpr bool kHasTiles = false;
constexpr int kFloatTileRows = 1 << 30;
constexpr int kMaxTileRows = 1 << 30;
inline size_t tile_scratch_floats(int k) { return unpacked_scratch_floats(k); }

#endif

}  // namespace naru
