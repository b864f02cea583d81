#include "activations.h"

namespace naru {
namespace {

// To the first group's bytes and meta; the next ones are kTileRows further on.
void quantize_groups(const float* x, int groups, int8_t* q, GroupMeta* meta) {
  const vf magic = vset(12582912.f);  // 1.5 * 2^23: rounds to nearest even
  for (int g = 0; g < groups; ++g) {
    const V16 a = load16(x + g * kGroup), b = load16(x + g * kGroup + 16);
    const float top = hmax16(max16(abs16(a), abs16(b)));
    const float scale = top / 127.f;
    const float inverse = top > 0.f ? 127.f / top : 0.f;
    const V16 parts[2] = {a, b};
    int32_t sums[2];
#if defined(__AVX2__) && !defined(__AVX512F__)
    // The compiler would take a conversion of integers to bytes apart, lane by lane.
    __m256i r[4];
    for (int i = 0; i < 4; ++i) r[i] = (__m256i)((vi)(parts[i / 2].v[i % 2] * vset(inverse) + magic) - (vi)magic);
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_store_si256(reinterpret_cast<__m256i*>(q + g * kTileRows * kGroup), bytes);
    // Four sums of eight bytes, each raised by 128.
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    for (int half = 0; half < 2; ++half)
      sums[half] = static_cast<int32_t>(((__v4di)eights)[2 * half] + ((__v4di)eights)[2 * half + 1]) - 16 * 128;
#else
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
#endif
    meta[g * kTileRows] = GroupMeta{scale, scale * static_cast<float>(sums[0] + sums[1]), {-128 * sums[0], -128 * sums[1]}};
  }
}

// To the first group's place in its tile.
void round_groups(const float* x, int count, bf16* h) {
  for (int c = 0; c < count; c += 32, h += 512) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load16(x + c + 16).v[0], (__m512)load16(x + c).v[0]);
    _mm512_store_si512(h, (__m512i)both);
#else
    store16(h, load16(x + c));
    store16(h + 16, load16(x + c + 16));
#endif
  }
}

// Of a row and group among the groups of tiles of 16 rows.
size_t place_of(int width, int row, int group) {
  return (static_cast<size_t>(row / kTileRows) * (width / kGroup) + group) * kTileRows + row % kTileRows;
}

}  // namespace

void put_tile_row(const float* x, int width, int row, bf16* h) {
  round_groups(x, width, h + place_of(width, row, 0) * kGroup);
}

void emit_part(const Activations& a, int row, int column, int count, const float* x, int tile_row) {
  float* f = a.f + static_cast<size_t>(row) * a.ld + column;
  if (a.wants_f && f != x) memcpy(f, x, static_cast<size_t>(count) * sizeof(float));
  if (!a.wants_q) return;
  if (tile_row >= 0) return round_groups(x, count, a.h + place_of(a.width, tile_row, column / kGroup) * kGroup);
  const size_t place = place_of(a.width, row, column / kGroup);
  quantize_groups(x, count / kGroup, a.q + place * kGroup, a.meta + place);
}

void emit_row(const Activations& a, int row, const float* x, int tile_row) {
  emit_part(a, row, 0, a.width, x, tile_row);
}

}  // namespace naru
