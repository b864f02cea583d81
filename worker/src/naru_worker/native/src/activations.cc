#include "activations.h"

namespace naru {

void quantize_row(const float* x, int width, int row, int8_t* q, GroupMeta* meta) {
  const size_t tile = static_cast<size_t>(row / kTileRows) * (width / kGroup) * kTileRows;
  q += (tile + row % kTileRows) * kGroup;
  meta += tile + row % kTileRows;
  const vf magic = vset(12582912.f);  // 1.5 * 2^23: rounds to nearest even
  for (int g = 0; g < width / kGroup; ++g) {
    const V16 a = load16(x + g * kGroup), b = load16(x + g * kGroup + 16);
    const float top = hmax16(max16(abs16(a), abs16(b)));
    const float scale = top / 127.f;
    const float inverse = top > 0.f ? 127.f / top : 0.f;
    const V16 parts[2] = {a, b};
    int32_t sums[2];
    for (int half = 0; half < 2; ++half) {
      vi sum = viset(0);
      for (int i = 0; i < kParts; ++i) {
        const vi r = (vi)(parts[half].v[i] * vset(inverse) + magic) - (vi)magic;
        sum = sum + r;
        *reinterpret_cast<vbu*>(q + g * kTileRows * kGroup + half * 16 + i * kLanes) = __builtin_convertvector(r, vbu);
      }
#if defined(__AVX512F__)
      sums[half] = _mm512_reduce_add_epi32((__m512i)sum);
#else
      sums[half] = 0;
      for (int i = 0; i < kLanes; ++i) sums[half] += sum[i];
#endif
    }
    meta[g * kTileRows] = GroupMeta{scale, scale * static_cast<float>(sums[0] + sums[1]), {-128 * sums[0], -128 * sums[1]}};
  }
}

void put_tile_row(const float* x, int width, int row, bf16* h) {
  h += static_cast<size_t>(row / 16) * width * 16 + row % 16 * 32;
  for (int c = 0; c < width; c += 32, h += 512) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load16(x + c + 16).v[0], (__m512)load16(x + c).v[0]);
    _mm512_store_si512(h, (__m512i)both);
#else
    store16(h, load16(x + c));
    store16(h + 16, load16(x + c + 16));
#endif
  }
}

void emit_row(const Activations& a, int row, const float* x, int tile_row) {
  const size_t r = static_cast<size_t>(row);
  if (a.wants_f && a.f + r * a.ld != x) memcpy(a.f + r * a.ld, x, static_cast<size_t>(a.width) * 4);
  if (!a.wants_q) return;
  if (tile_row >= 0)
    put_tile_row(x, a.width, tile_row, a.h);
  else
    quantize_row(x, a.width, row, a.q, a.meta);
}

}  // namespace naru
