// Bringing mapped pages in, and checking what lies in them, at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace naru {

// Makes the pages of [address, address + bytes) present. With `sums`, also adds up each piece of `chunk_bytes` (a
// multiple of 8) as little-endian words of 64 bits, modulo 2^64; the last word is padded with zeros. False: the pages
// cannot be read, as when the file behind them has become shorter.
bool fault_in(const uint8_t* address, size_t bytes, uint64_t* sums, size_t chunk_bytes);

}  // namespace naru
