// The paged KV cache. Block-first: one block holds its tokens' keys and values of all layers, so copying one is a memcpy.
//
// Inside a block, per layer: keys of all heads, then values of all heads.
//   keys   [kv head][head_dim][block_size]        a register spans tokens: scores need no horizontal sum
//   values [kv head][block_size][head_dim padded] a register spans dimensions: the output needs none either
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
  int element_bytes = 2;  // 2: f16, 4: f32
  uint8_t* base = nullptr;

  size_t key_elements() const { return static_cast<size_t>(head_dim) * block_size; }
  size_t value_elements() const { return static_cast<size_t>(padded_dim) * block_size; }
  size_t layer_bytes() const { return num_heads * (key_elements() + value_elements()) * element_bytes; }
  size_t block_bytes() const { return layer_bytes() * num_layers; }

  // Offsets inside a block, in elements of the layer's part.
  uint8_t* keys(int layer, int head) const {
    return base + layer * layer_bytes() + head * key_elements() * element_bytes;
  }
  uint8_t* values(int layer, int head) const {
    return base + layer * layer_bytes() + (num_heads * key_elements() + head * value_elements()) * element_bytes;
  }
};

}  // namespace naru
