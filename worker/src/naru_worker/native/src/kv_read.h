// Reads blocks of the cache as floats, whatever they are stored as.
//
// A reader stands on sixteen tokens of one kv head, which lie in one block. Slots that no token was written to may hold
// anything, NaN included.
#pragma once

#include "kv.h"

namespace naru {

// The first of the block's tokens to read, a multiple of 16.
struct KVPlace {
  int layer;
  int head;
  int block;
  int offset;
};

template <typename T>
class KeyReader {
 public:
  KeyReader(const KVCache& kv, const KVPlace& at)
      : keys_(reinterpret_cast<const T*>(kv.keys(at.layer, at.head) + static_cast<size_t>(at.block) * kv.block_bytes()) +
              at.offset),
        stride_(kv.block_size) {}

  // Dimension d, in [0, head_dim), of sixteen tokens.
  NARU_INLINE V16 row(int d) const { return load16(keys_ + static_cast<size_t>(d) * stride_); }

 private:
  const T* keys_;
  size_t stride_;
};

template <typename T>
class ValueReader {
 public:
  ValueReader(const KVCache& kv, const KVPlace& at)
      : values_(reinterpret_cast<const T*>(kv.values(at.layer, at.head) +
                                           static_cast<size_t>(at.block) * kv.block_bytes()) +
                static_cast<size_t>(at.offset) * kv.padded_dim),
        stride_(kv.padded_dim) {}

  // Dimensions [d, d + 16) of a token, in [0, 16); d a multiple of 16 below padded_dim.
  NARU_INLINE V16 part(int token, int d) const { return load16(values_ + static_cast<size_t>(token) * stride_ + d); }

 private:
  const T* values_;
  size_t stride_;
};

// Of scaled bytes. A slot's scale may be anything where no token was written.
template <>
class KeyReader<uint8_t> {
 public:
  KeyReader(const KVCache& kv, const KVPlace& at)
      : quads_(kv.keys(at.layer, at.head) + static_cast<size_t>(at.block) * kv.block_bytes() +
               static_cast<size_t>(at.offset) * 4),
        stride_(static_cast<size_t>(kv.block_size) * 4),
        scales_(load16(reinterpret_cast<const float*>(kv.key_scales(at.layer, at.head) +
                                                      static_cast<size_t>(at.block) * kv.block_bytes()) +
                       at.offset)) {}

  NARU_INLINE V16 row(int d) const { return load_quads(quads_ + static_cast<size_t>(d / 4) * stride_, d % 4) * scales_; }

 private:
  const uint8_t* quads_;
  size_t stride_;
  V16 scales_;
};

template <>
class ValueReader<uint8_t> {
 public:
  ValueReader(const KVCache& kv, const KVPlace& at)
      : quads_(kv.values(at.layer, at.head) + static_cast<size_t>(at.block) * kv.block_bytes() +
               static_cast<size_t>(at.offset) * kv.padded_dim),
        stride_(static_cast<size_t>(kv.padded_dim) * 4),
        scales_(reinterpret_cast<const float*>(kv.value_scales(at.layer, at.head) +
                                               static_cast<size_t>(at.block) * kv.block_bytes()) +
                at.offset) {}

  NARU_INLINE V16 part(int token, int d) const {
    return load_quads(quads_ + static_cast<size_t>(token / 4) * stride_ + static_cast<size_t>(d) * 4, token % 4) *
           set16(scales_[token]);
  }

 private:
  const uint8_t* quads_;
  size_t stride_;
  const float* scales_;
};

// Asks for a block's keys and values: short runs far from the next block's, which the hardware cannot guess.
NARU_INLINE void fetch_kv(const KVCache& kv, const KVPlace& at) {
  const size_t block = static_cast<size_t>(at.block) * kv.block_bytes();
  const char* keys = reinterpret_cast<const char*>(kv.keys(at.layer, at.head) + block);
  const char* values = reinterpret_cast<const char*>(kv.values(at.layer, at.head) + block);
  for (size_t i = 0; i < kv.key_bytes(); i += 64) _mm_prefetch(keys + i, _MM_HINT_T0);
  for (size_t i = 0; i < kv.value_bytes(); i += 64) _mm_prefetch(values + i, _MM_HINT_T0);
}

// Calls f with a null pointer to the cache's element type.
template <typename F>
NARU_INLINE void with_kv_format(const KVCache& kv, F f) {
  if (kv.has_bytes())
    f(static_cast<const uint8_t*>(nullptr));
  else if (kv.element_bytes == 2)
    f(static_cast<const f16*>(nullptr));
  else
    f(static_cast<const float*>(nullptr));
}

}  // namespace naru
