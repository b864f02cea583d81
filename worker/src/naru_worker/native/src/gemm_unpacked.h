// Linear layers of many rows on the vector unit: panels are unpacked once and then meet all rows.
#pragma once

#include "gemm.h"

namespace naru {

#if defined(__AVX2__) && !defined(__AMX_TILE__)

constexpr bool kHasUnpacked = true;
#if defined(__AVX512F__)
constexpr int kUnpackedRows = 17;   // from this many rows on unpacking once beats unpacking for each few rows
constexpr int kUnpackedPanels = 2;  // panels side by side: a broadcast activation serves both
#else
constexpr int kUnpackedRows = 5;
constexpr int kUnpackedPanels = 1;  // sixteen registers hold the sums of one
#endif

// Floats of scratch a member needs for matrices of k columns: quantized panels, panels of floats.
size_t unpacked_scratch_floats(int k);

// Whether unpacking pays for a format and that many rows, kUnpackedRows or more; measured.
bool pays_unpacked(int format, int rows);

// All rows of panels [index, index + count) of a segment of floats.
void float_panels(const Linear& job, const Segment& s, int index, int count);

// All rows of panels [index, index + count) of a quantized segment, 1 <= count <= kUnpackedPanels. The numbers are those of
// the kernels for few rows, bit for bit.
void unpacked_panels(const Linear& job, const Segment& s, int index, int count, const uint8_t* ahead);

#else

constexpr bool kHasUnpacked = false;
constexpr int kUnpackedRows = 1 << 30;
constexpr int kUnpackedPanels = 1;
inline size_t unpacked_scratch_floats(int) { return 0; }
inline bool pays_unpacked(int, int) { return false; }
inline void float_panels(const Linear&, const Segment&, int, int) {}
inline void unpacked_panels(const Linear&, const Segment&, int, int, const uint8_t*) {}

#endif

}  // namespace naru
