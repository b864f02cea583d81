#include "rope.h"

#include <cmath>

#include "rowops.h"

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

// Rounds to bytes in units of the largest number / 127, plus 128. Gives the unit. What lies behind `dim` becomes 128.
float to_bytes(const float* x, int dim, int padded, uint8_t* out) {
  V16 most = set16(0.f);
  for (int c = 0; c < dim; c += 16) most = max16(abs16(load16n(x + c, dim - c)), most);
  const float high = hmax16(most);
  const V16 inverse = set16(high > 0.f ? 127.f / high : 0.f);
  // Adding 1.5 * 2^23 rounds to an integer that sits in the low mantissa bits.
  const V16 magic = set16(12582912.f + 128.f);
  for (int c = 0; c < padded; c += 16) {
    const V16 t = fma16(load16n(x + c, dim > c ? dim - c : 0), inverse, magic);
    // The compiler would take a conversion of integers to bytes apart, lane by lane.
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + c), _mm512_cvtepi32_epi8((__m512i)t.v[0]));
#else
    alignas(64) uint32_t bits[16];
    for (int i = 0; i < kParts; ++i) *reinterpret_cast<viu*>(bits + i * kLanes) = (vi)t.v[i];
    for (int i = 0; i < 16; ++i) out[c + i] = static_cast<uint8_t>(bits[i]);
#endif
  }
  return high / 127.f;
}

// Other members may be writing to the same quads: bytes alone are stored.
void write_bytes(const float* k, const float* v, const KVCache& kv, int layer, int head, int slot, uint8_t* bytes) {
  const size_t block = static_cast<size_t>(slot / kv.block_size) * kv.block_bytes();
  const int offset = slot % kv.block_size, padded = kv.padded_dim;
  reinterpret_cast<float*>(kv.key_scales(layer, head) + block)[offset] = to_bytes(k, kv.head_dim, padded, bytes);
  uint8_t* keys = kv.keys(layer, head) + block + offset * 4;
  for (int d = 0; d < padded; d += 4) memcpy(keys + static_cast<size_t>(d) * kv.block_size, bytes + d, 4);
  reinterpret_cast<float*>(kv.value_scales(layer, head) + block)[offset] = to_bytes(v, kv.head_dim, padded, bytes);
  uint8_t* values = kv.values(layer, head) + block + static_cast<size_t>(offset / 4) * padded * 4 + offset % 4;
  for (int d = 0; d < padded; ++d) values[d * 4] = bytes[d];
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

void rope_kv_row(float* row, int num_heads, const HeadNorms& norms, const float* table, int rotary_dim,
                 const KVCache& kv, int layer, int slot, float* scratch) {
  const int dim = kv.head_dim;
  for (int h = 0; h < num_heads + kv.num_heads; ++h) {
    float* x = row + static_cast<size_t>(h) * dim;
    const float* norm = h < num_heads ? norms.q : norms.k;
    if (norm != nullptr) norm_row(x, dim, norm, nullptr, norms.eps, kRms, x);
    if (table != nullptr) rotate(x, table, rotary_dim / 2);
  }
  const float* k = row + static_cast<size_t>(num_heads) * dim;
  const float* v = k + static_cast<size_t>(kv.num_heads) * dim;
  for (int h = 0; h < kv.num_heads; ++h) {
    if (kv.has_bytes())
      write_bytes(k + h * dim, v + h * dim, kv, layer, h, slot, reinterpret_cast<uint8_t*>(scratch));
    else if (kv.element_bytes == 2)
      write_kv<f16>(k + h * dim, v + h * dim, kv, layer, h, slot);
    else
      write_kv<float>(k + h * dim, v + h * dim, kv, layer, h, slot);
  }
}

}  // namespace naru
