#include "rope.h"

#include <cmath>

namespace naru {
namespace {

// Half-rotation: element i pairs with i + half.
void rotate(float* x, const float* table, int half) {
  const float* cosine = table;
  const float* sine = table + half;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const V16 a = load16(x + i), b = load16(x + half + i), c = load16(cosine + i), s = load16(sine + i);
    store16(x + i, a * c - b * s);
    store16(x + half + i, fma16(b, c, a * s));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosine[i] - b * sine[i];
    x[half + i] = b * cosine[i] + a * sine[i];
  }
}

void put(float* to, float x) { *to = x; }
void put(f16* to, float x) { *to = to_f16(x); }

template <typename T>
void write_kv(const float* k, const float* v, const KVCache& kv, int layer, int head, int slot) {
  const size_t block = static_cast<size_t>(slot / kv.block_size) * kv.block_bytes();
  const int offset = slot % kv.block_size;
  const int dim = kv.head_dim;
  T* keys = reinterpret_cast<T*>(kv.keys(layer, head) + block) + offset;
  T* values = reinterpret_cast<T*>(kv.values(layer, head) + block) + static_cast<size_t>(offset) * kv.padded_dim;
  T key[16];
  int c = 0;
  for (; c + 16 <= dim; c += 16) {
    store16(key, load16(k + c));
    for (int i = 0; i < 16; ++i) keys[static_cast<size_t>(c + i) * kv.block_size] = key[i];
    store16(values + c, load16(v + c));
  }
  for (; c < dim; ++c) {
    put(keys + static_cast<size_t>(c) * kv.block_size, k[c]);
    put(values + c, v[c]);
  }
  // Padding lanes are multiplied like the others: they must hold numbers.
  for (; c < kv.padded_dim; ++c) put(values + c, 0.f);
}

}  // namespace

void rope_table_row(int position, const double* inverse_frequency, int half, float factor, float* table) {
  for (int i = 0; i < half; ++i) {
    // In double: at position 100000 a float angle is off by a hundredth of a radian.
    const double angle = position * inverse_frequency[i];
    table[i] = static_cast<float>(std::cos(angle)) * factor;
    table[half + i] = static_cast<float>(std::sin(angle)) * factor;
  }
}

void rope_kv_row(float* row, int num_heads, const float* table, int rotary_dim, const KVCache& kv, int layer,
                 int slot) {
  const int dim = kv.head_dim;
  if (table != nullptr)
    for (int h = 0; h < num_heads + kv.num_heads; ++h) rotate(row + static_cast<size_t>(h) * dim, table, rotary_dim / 2);
  const float* k = row + static_cast<size_t>(num_heads) * dim;
  const float* v = k + static_cast<size_t>(kv.num_heads) * dim;
  for (int h = 0; h < kv.num_heads; ++h) {
    if (kv.element_bytes == 2)
      write_kv<f16>(k + h * dim, v + h * dim, kv, layer, h, slot);
    else
      write_kv<float>(k + h * dim, v + h * dim, kv, layer, h, slot);
  }
}

}  // namespace naru
