// Quantized panels unpacked to bytes and float scales, then multiplied with blocks of rows.
//
// Sums of a block of rows stay in memory between groups: they are touched once per group, which the eight byte products
// between hide, and the registers are left to the integer sums.
#include "gemm_unpacked.h"

#include "scales.h"

#if defined(__AVX2__) && !defined(__AMX_TILE__)

namespace naru {
namespace {

// How an unpacked group is multiplied. All nibble formats look alike once unpacked.
enum Kind { kNibbles, kBytes, kHalves };

constexpr Kind kind_of(int format) { return format == kW8 ? kBytes : format == kW6K ? kHalves : kNibbles; }

#if defined(__AVX512F__)
constexpr int kBlockRows = 8;
constexpr bool kSplitBytes = false;
#else
constexpr int kBlockRows = 4;
// Without byte dot products of full range, bytes become two nibbles, whose products can be added in 16 bits.
constexpr bool kSplitBytes = true;
#endif

// An unpacked group: quants [step][16 rows][4], then two rows of sixteen scales.
constexpr int quant_bytes(Kind kind) { return kind == kBytes && kSplitBytes ? 1024 : 512; }
constexpr int group_bytes(Kind kind) { return quant_bytes(kind) + 128; }
constexpr int kMaxGroupBytes = 1024 + 128;

typedef uint32_t Words __attribute__((vector_size(sizeof(vi))));

NARU_INLINE vi load_lanes(const uint8_t* p) { return *reinterpret_cast<const vi*>(p); }
NARU_INLINE void store_lanes(uint8_t* p, vi v) { *reinterpret_cast<vi*>(p) = v; }

template <int F>
void unpack(const uint8_t* panel, int groups, uint8_t* out) {
  constexpr Unit u = unit_of(F);
  constexpr Kind kind = kind_of(F);
  const vi low = viset(0x0f0f0f0f);
  for (int g = 0; g < groups; ++g, out += group_bytes(kind)) {
    const int i = g % u.groups;
    const uint8_t* unit = panel + static_cast<size_t>(g / u.groups) * u.bytes;
    const uint8_t* q = unit + i * u.quants;
    for (int at = 0; at < u.quants; at += kLanes * 4) {
      const vi v = load_lanes(q + at);
      if (kind == kNibbles || (kind == kBytes && kSplitBytes)) {
        store_lanes(out + at, v & low);
        store_lanes(out + u.quants + at, (v >> 4) & low);
      } else {
        // 16-bit sums: kHalves has six bits. No byte borrows from its neighbour; the lane as a whole may wrap.
        store_lanes(out + at, kSplitBytes ? (vi)((Words)v - (Words)viset(0x60606060)) : v);
      }
    }
    float* to = reinterpret_cast<float*>(out + quant_bytes(kind));
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      vf a, b;
      if (kind == kHalves)
        half_scales(unit, i, lane, &a, &b);
      else
        group_scales<F>(unit, i, lane, &a, &b);
      vstore(to + lane, a);
      vstore(to + kPanel + lane, b);
    }
  }
}

void unpack_any(int format, const uint8_t* panel, int groups, uint8_t* out) {
  switch (format) {
    case kW4:
      return unpack<kW4>(panel, groups, out);
    case kW4M:
      return unpack<kW4M>(panel, groups, out);
    case kW8:
      return unpack<kW8>(panel, groups, out);
    case kW4K:
      return unpack<kW4K>(panel, groups, out);
    default:
      return unpack<kW6K>(panel, groups, out);
  }
}

// Four activations of one row, in every lane.
NARU_INLINE vi spread(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return viset(four);
}

// One block: R rows times P panels. sums: [R][P * 16].
struct Block {
  const uint8_t* w;     // unpacked panels
  size_t panel_stride;  // bytes from one to the next
  int groups;
  QRows x;
  const uint8_t* ahead;  // fetched meanwhile, or null
  int ahead_lines;       // per group
};

NARU_INLINE void fetch_group(const Block& b, int g) {
  if (b.ahead == nullptr) return;
  const uint8_t* p = b.ahead + static_cast<size_t>(g) * b.ahead_lines * 64;
  for (int i = 0; i < b.ahead_lines; ++i) fetch_line(p + i * 64);
}

// sum + dot * (d * scale): the one order in which every kernel scales.
NARU_INLINE vf add_scaled(vf sum, vi dot, vf d, float scale) { return vfloat(dot) * (d * vset(scale)) + sum; }

#if defined(__AVX512F__)

// Steps [0, N) of a group from the integers in a.
template <int N, int P, int R>
NARU_INLINE void multiply(const uint8_t* w, size_t panel_stride, const int8_t* x, __m512i (&a)[P][R]) {
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    __m512i v[P];
    for (int p = 0; p < P; ++p) v[p] = _mm512_load_si512(w + p * panel_stride + j * 64);
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const __m512i four = (__m512i)spread(x + m * kGroup + j * 4);
      for (int p = 0; p < P; ++p) a[p][m] = _mm512_dpbusd_epi32(a[p][m], v[p], four);
    }
  }
}

template <Kind K, int P, int R>
void block(const Block& b, float* sums) {
  for (int i = 0; i < R * P; ++i) vstore(sums + i * kPanel, vset(0.f));
  const uint8_t* w = b.w;
  for (int g = 0; g < b.groups; ++g, w += group_bytes(K)) {
    fetch_group(b, g);
    const int8_t* x = b.x.q + g * kQStep;
    const GroupMeta* meta = b.x.meta + g * kTileRows;
#pragma GCC unroll 2
    for (int half = 0; half < (K == kHalves ? 2 : 1); ++half) {
      __m512i a[P][R];
      for (int m = 0; m < R; ++m) {
        const int start = K == kNibbles ? 0 : K == kHalves ? meta[m].bias[half] : meta[m].bias[0] + meta[m].bias[1];
        for (int p = 0; p < P; ++p) a[p][m] = _mm512_set1_epi32(start);
      }
      multiply<K == kHalves ? 4 : 8, P, R>(w + half * 256, b.panel_stride, x + half * 16, a);
      for (int p = 0; p < P; ++p) {
        const float* scales = reinterpret_cast<const float*>(w + p * b.panel_stride + quant_bytes(K));
        const vf d = vload(scales + half * kPanel);
        const vf low = vload(scales + kPanel);
        for (int m = 0; m < R; ++m) {
          float* sum = sums + (m * P + p) * kPanel;
          const vf t = add_scaled(vload(sum), (vi)a[p][m], d, meta[m].scale);
          vstore(sum, K == kNibbles ? low * vset(meta[m].sum) + t : t);
        }
      }
    }
  }
}

#else

// The compiler would add up in trees, all products at once, for which there are not enough registers.
NARU_INLINE void hold(__m256i* v) { asm("" : "+x"(*v)); }

// Sums of byte products in 16 bits over N steps, two halves of a panel: no saturation as long as N * 2 * (largest weight) *
// 127 stays below 2^15.
template <int N, int R>
NARU_INLINE void multiply(const uint8_t* w, const int8_t* x, __m256i (&a)[2][R]) {
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    const __m256i w0 = (__m256i)load_lanes(w + j * 64), w1 = (__m256i)load_lanes(w + j * 64 + 32);
#pragma GCC unroll 4
    for (int m = 0; m < R; ++m) {
      const __m256i four = (__m256i)spread(x + m * kGroup + j * 4);
      const __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
      a[0][m] = j == 0 ? p0 : _mm256_add_epi16(a[0][m], p0);
      a[1][m] = j == 0 ? p1 : _mm256_add_epi16(a[1][m], p1);
      hold(&a[0][m]);
      hold(&a[1][m]);
    }
  }
}

// sum + dot * (d * scale) + low * meta.sum for one row and half of a panel.
NARU_INLINE vf add_nibbles(vf sum, __m256i pairs, const float* scales, const GroupMeta& meta) {
  const vi dot = (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  return vload(scales + kPanel) * vset(meta.sum) + add_scaled(sum, dot, vload(scales), meta.scale);
}

// Sums of up to three rows fit the registers beside the integers.
template <int R>
NARU_INLINE void nibble_block(const Block& b, float* sums) {
  constexpr bool kHeld = R <= 3;
  vf held[2][R];
  for (int part = 0; part < 2; ++part)
    for (int m = 0; m < R; ++m) {
      held[part][m] = vset(0.f);
      if (!kHeld) vstore(sums + m * kPanel + part * kLanes, held[part][m]);
    }
  const uint8_t* w = b.w;
  const int8_t* x = b.x.q;
  const GroupMeta* meta = b.x.meta;
  for (int g = 0; g < b.groups; ++g, w += group_bytes(kNibbles), x += kQStep, meta += kTileRows) {
    fetch_group(b, g);
    __m256i a[2][R];
    multiply<8, R>(w, x, a);
    const float* scales = reinterpret_cast<const float*>(w + quant_bytes(kNibbles));
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part)
#pragma GCC unroll 4
      for (int m = 0; m < R; ++m) {
        float* sum = sums + m * kPanel + part * kLanes;
        if (kHeld)
          held[part][m] = add_nibbles(held[part][m], a[part][m], scales + part * kLanes, meta[m]);
        else
          vstore(sum, add_nibbles(vload(sum), a[part][m], scales + part * kLanes, meta[m]));
      }
  }
  if (!kHeld) return;
  for (int part = 0; part < 2; ++part)
    for (int m = 0; m < R; ++m) vstore(sums + m * kPanel + part * kLanes, held[part][m]);
}

// Bytes as 16 high + low.
template <int R>
NARU_INLINE void byte_group(const uint8_t* w, const int8_t* x, const GroupMeta* meta, float* sums) {
  const __m256i ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  __m256i a[2][R], b[2][R];
  multiply<8, R>(w, x, a);
  for (int part = 0; part < 2; ++part)
    for (int m = 0; m < R; ++m) a[part][m] = _mm256_madd_epi16(a[part][m], ones);
  multiply<8, R>(w + 512, x, b);
  const float* scales = reinterpret_cast<const float*>(w + quant_bytes(kBytes));
  for (int part = 0; part < 2; ++part) {
    const vf d = vload(scales + part * kLanes);
    for (int m = 0; m < R; ++m) {
      const vi dot = (vi)a[part][m] + (vi)_mm256_madd_epi16(b[part][m], sixteens) +
                     viset(meta[m].bias[0] + meta[m].bias[1]);
      float* sum = sums + m * kPanel + part * kLanes;
      vstore(sum, add_scaled(vload(sum), dot, d, meta[m].scale));
    }
  }
}

// Six bits, biased by 32: two steps fit 16 bits.
template <int R>
NARU_INLINE void half_group(const uint8_t* w, const int8_t* x, const GroupMeta* meta, float* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  const float* scales = reinterpret_cast<const float*>(w + quant_bytes(kHalves));
  for (int half = 0; half < 2; ++half) {
    __m256i a[2][R], b[2][R];
    multiply<2, R>(w + half * 256, x + half * 16, a);
    for (int part = 0; part < 2; ++part)
      for (int m = 0; m < R; ++m) a[part][m] = _mm256_madd_epi16(a[part][m], ones);
    multiply<2, R>(w + half * 256 + 128, x + half * 16 + 8, b);
    for (int part = 0; part < 2; ++part) {
      const vf d = vload(scales + half * kPanel + part * kLanes);
      for (int m = 0; m < R; ++m) {
        // bias is -128 times the sum of activations, a multiple of four.
        const vi dot = (vi)a[part][m] + (vi)_mm256_madd_epi16(b[part][m], ones) + viset(meta[m].bias[half] / 4);
        float* sum = sums + m * kPanel + part * kLanes;
      vstore(sum, add_scaled(vload(sum), dot, d, meta[m].scale));
      }
    }
  }
}

template <Kind K, int P, int R>
void block(const Block& b, float* sums) {
  static_assert(P == 1, "sixteen registers");
  if (K == kNibbles) return nibble_block<R>(b, sums);
  for (int i = 0; i < R * kPanel; i += kLanes) vstore(sums + i, vset(0.f));
  const uint8_t* w = b.w;
  for (int g = 0; g < b.groups; ++g, w += group_bytes(K)) {
    fetch_group(b, g);
    const int8_t* x = b.x.q + g * kQStep;
    const GroupMeta* meta = b.x.meta + g * kTileRows;
    if (K == kBytes)
      byte_group<R>(w, x, meta, sums);
    else
      half_group<R>(w, x, meta, sums);
  }
}

#endif

using BlockKernel = void (*)(const Block& b, float* sums);

template <Kind K, int P>
BlockKernel pick(int rows) {
  static const BlockKernel table[] = {block<K, P, 1>, block<K, P, 2>, block<K, P, 3>, block<K, P, 4>,
#if defined(__AVX512F__)
                                      block<K, P, 5>, block<K, P, 6>, block<K, P, 7>, block<K, P, 8>
#endif
  };
  return table[rows - 1];
}

template <int P>
BlockKernel block_kernel(Kind kind, int rows) {
  if (kind == kNibbles) return pick<kNibbles, P>(rows);
  return kind == kBytes ? pick<kBytes, P>(rows) : pick<kHalves, P>(rows);
}

}  // namespace

size_t unpacked_scratch_floats(int k) {
  const size_t quantized = static_cast<size_t>(k / kGroup) * kMaxGroupBytes / sizeof(float);
  const size_t floats = static_cast<size_t>(k) * kPanel;
  return (quantized > floats ? quantized : floats) * kUnpackedPanels + 64;
}

bool pays_unpacked(int format, int rows) {
#if defined(__AVX512F__)
  // Six bits lie in memory as bytes: there is nothing to unpack but scales.
  if (format == kW6K) return false;
  return format != kW8 || rows >= 64;
#else
  if (format == kW8) return rows >= 32;
  return is_quantized(format) || rows > 8;
#endif
}

// Rows of the next block: within one tile of rows.
int rows_of_block(Kind kind, int left) {
#if !defined(__AVX512F__)
  if (kind == kNibbles && left != kBlockRows) return left < 3 ? left : 3;
#endif
  return left < kBlockRows ? left : kBlockRows;
}

void unpacked_panels(const Linear& job, const Segment& s, int index, int count, const uint8_t* ahead) {
  const int groups = job.w->k / kGroup;
  const Kind kind = kind_of(s.format);
  const size_t stride = static_cast<size_t>(groups) * group_bytes(kind);
  uint8_t* unpacked = reinterpret_cast<uint8_t*>(job.scratch);
  for (int i = 0; i < count; ++i)
    unpack_any(s.format, s.data + static_cast<size_t>(index + i) * s.panel_bytes, groups, unpacked + i * stride);

  const size_t lines = s.panel_bytes * static_cast<size_t>(count) / 64;
  Block b{unpacked, stride, groups, QRows{}, ahead, static_cast<int>((lines + groups - 1) / groups)};
  const int column = s.first_row + index * kPanel;
  const int left = s.rows - index * kPanel;
  const int ld = count * kPanel;
  alignas(64) float sums[kBlockRows * kUnpackedPanels * kPanel];
  for (int row = 0, rows = 0; row < job.rows; row += rows) {
    const int end = row / kTileRows * kTileRows + kTileRows;
    rows = rows_of_block(kind, (job.rows < end ? job.rows : end) - row);
    for (int m = 0; m < rows; ++m) __builtin_prefetch(job.out + static_cast<size_t>(row + m) * job.ld + column, 1);
    b.x = rows_from(*job.x, row);
    if (count == 1)
      block_kernel<1>(kind, rows)(b, sums);
    else
      block_kernel<kUnpackedPanels>(kind, rows)(b, sums);
    for (int i = 0; i < count; ++i) {
      const int columns = left - i * kPanel < kPanel ? left - i * kPanel : kPanel;
      put_tile(job, sums + i * kPanel, ld, row, rows, column + i * kPanel, columns);
    }
    b.ahead = nullptr;  // once is enough
  }
}

}  // namespace naru

#endif
