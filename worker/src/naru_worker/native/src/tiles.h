// AMX tile state: permission and configuration.
#pragma once

namespace naru {

// Asks the kernel for the tile registers, once per process; false where there are none.
bool tiles_allow();

#if defined(__AMX_TILE__)
// Sets the calling thread's tile shapes for each way, and gives the tiles back: a thread that holds some costs the kernel
// 8 KB of state at each switch.
void byte_tile_shapes();
void float_tile_shapes();
void release_tiles();
#endif

}  // namespace naru
