#include "tiles.h"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "pairs.h"

namespace naru {
#if defined(__AMX_TILE__)
namespace {

constexpr int kTile = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All tiles are 16 rows of 64 bytes, except the operands of the byte products: 4 (activations) and 5 (weights).
void set_shapes(int a_bytes, int b_rows) {
  TileConfig c;
  for (int t = 0; t < 8; ++t) {
    c.rows[t] = kTile;
    c.column_bytes[t] = 64;
  }
  c.column_bytes[4] = static_cast<uint16_t>(a_bytes);
  c.rows[5] = static_cast<uint8_t>(b_rows);
  settle(&c);
  _tile_loadconfig(&c);
}

}  // namespace

void byte_tile_shapes() { set_shapes(32, 8); }

void float_tile_shapes() { set_shapes(64, 16); }

void release_tiles() { _tile_release(); }

#endif

bool tiles_allow() {
#if defined(__AMX_TILE__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  // The permission is the process's, and asking again is harmless.
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

}  // namespace naru
