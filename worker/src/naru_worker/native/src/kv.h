// The paged KV cache. Block-first: one block holds its tokens' keys and values of all layers, so copying one is a memcpy.
//
// Inside a block, per layer and kv head: keys, values, scales.
//   floats and halves
//     keys   [head_dim][block_size]         a register spans tokens: scores need no horizontal sum
//     values [block_size][head_dim padded]  a register spans dimensions: the output needs none either
//   bytes: value + 128, in units of the token's scale; four neighbours of what is summed over lie together
//     keys   [head_dim padded / 4][block_size][4]
//     values [block_size / 4][head_dim padded][4]
//     scales [2][block_size], floats: of the keys, then of the values
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace naru {

struct KVCache {
  int num_layers = 0;
  int num_heads = 0;  // kv heads
  int head_dim = 0;
  int padded_dim = 0;  // head_dim rounded up to 16
  int block_size = 0;  // a multiple of 16
  int num_blocks = 0;
  int element_bytes = 2;  // 1: scaled bytes, 2: f16, 4: f32
  uint8_t* base = nullptr;

  bool has_bytes() const { return element_bytes == 1; }
  size_t key_elements() const { return static_cast<size_t>(has_bytes() ? padded_dim : head_dim) * block_size; }
  size_t value_elements() const { return static_cast<size_t>(padded_dim) * block_size; }
  size_t key_bytes() const { return key_elements() * element_bytes; }
  size_t value_bytes() const { return value_elements() * element_bytes; }
  size_t scale_bytes() const { return has_bytes() ? 2 * static_cast<size_t>(block_size) * sizeof(float) : 0; }
  size_t head_bytes() const { return key_bytes() + value_bytes() + scale_bytes(); }
  size_t layer_bytes() const { return num_heads * head_bytes(); }
  size_t block_bytes() const { return layer_bytes() * num_layers; }

  // Of block 0.
  uint8_t* keys(int layer, int head) const { return base + layer * layer_bytes() + head * head_bytes(); }
  uint8_t* values(int layer, int head) const { return keys(layer, head) + key_bytes(); }
  uint8_t* key_scales(int layer, int head) const { return values(layer, head) + value_bytes(); }
  uint8_t* value_scales(int layer, int head) const { return key_scales(layer, head) + scale_bytes() / 2; }
};

// One of each four bytes of sixteen quads at p, less the 128 that was added.
NARU_INLINE V16 load_quads(const uint8_t* p, int which) {
  V16 out;
  for (int i = 0; i < kParts; ++i) {
    const vi x = *reinterpret_cast<const viu*>(p + i * kLanes * 4);
    out.v[i] = vfloat(((x >> (8 * which)) & viset(0xff)) - viset(128));
  }
  return out;
}

}  // namespace naru
