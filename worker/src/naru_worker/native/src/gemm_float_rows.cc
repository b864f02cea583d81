// Panels of floats that meet many rows: converted to f32 once, then multiplied with blocks of rows.
#include "gemm_unpacked.h"

#if defined(__AVX2__) && !defined(__AMX_TILE__)

namespace naru {
namespace {

#if defined(__AVX512F__)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 6;
#endif
// Rows whose sums are kept while blocks of columns pass, and columns of such a block: its weights stay in the L1 cache.
constexpr int kStripRows = 8 * kBlockRows;
constexpr int kBlockColumns = 256;

template <typename T>
void convert(const uint8_t* panel, int k, float* out) {
  const T* w = reinterpret_cast<const T*>(panel);
  for (int i = 0; i < k * kPanel; i += kLanes) vstore(out + i, vload(w + i));
}

// A strip's columns [begin, end) times P panels. sums: [row][P][16].
struct Block {
  const float* w[kUnpackedPanels];  // [column][16]
  const float* x;
  size_t ld;
  int begin, end;
};

template <int P, int R>
void block(const Block& b, float* sums) {
  vf acc[P][kParts][R];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kParts; ++i)
        acc[p][i][m] = b.begin == 0 ? vset(0.f) : vload(sums + (m * P + p) * kPanel + i * kLanes);
  for (int c = b.begin; c < b.end; ++c) {
    vf w[P][kParts];
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kParts; ++i) w[p][i] = vload(b.w[p] + static_cast<size_t>(c) * kPanel + i * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const vf v = vset(b.x[m * b.ld + c]);
      for (int p = 0; p < P; ++p)
        for (int i = 0; i < kParts; ++i) acc[p][i][m] = w[p][i] * v + acc[p][i][m];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
    for (int p = 0; p < P; ++p)
      for (int i = 0; i < kParts; ++i) vstore(sums + (m * P + p) * kPanel + i * kLanes, acc[p][i][m]);
}

using BlockKernel = void (*)(const Block& b, float* sums);

template <int P>
BlockKernel pick(int rows) {
  static const BlockKernel table[] = {block<P, 1>, block<P, 2>, block<P, 3>, block<P, 4>, block<P, 5>, block<P, 6>,
#if defined(__AVX512F__)
                                      block<P, 7>, block<P, 8>
#endif
  };
  return table[rows - 1];
}

void multiply_strip(Block b, int k, int rows, int count, const float* x, float* sums) {
  for (b.begin = 0; b.begin < k; b.begin = b.end) {
    b.end = k - b.begin < kBlockColumns ? k : b.begin + kBlockColumns;
    for (int row = 0; row < rows; row += kBlockRows) {
      const int n = rows - row < kBlockRows ? rows - row : kBlockRows;
      b.x = x + static_cast<size_t>(row) * b.ld;
      (count == 1 ? pick<1>(n) : pick<kUnpackedPanels>(n))(b, sums + row * count * kPanel);
    }
  }
}

}  // namespace

void float_panels(const Linear& job, const Segment& s, int index, int count) {
  const int k = job.w->k;
  Block b{};
  b.ld = job.x->ld;
  for (int i = 0; i < count; ++i) {
    const uint8_t* panel = s.data + static_cast<size_t>(index + i) * s.panel_bytes;
    float* converted = job.scratch + static_cast<size_t>(i) * k * kPanel;
    b.w[i] = s.format == kF32 ? reinterpret_cast<const float*>(panel) : converted;
    if (s.format == kF16) convert<f16>(panel, k, converted);
    if (s.format == kBF16) convert<bf16>(panel, k, converted);
  }
  const int column = s.first_row + index * kPanel;
  const int left = s.rows - index * kPanel;
  alignas(64) float sums[kStripRows * kUnpackedPanels * kPanel];
  for (int row = 0; row < job.rows; row += kStripRows) {
    const int rows = job.rows - row < kStripRows ? job.rows - row : kStripRows;
    multiply_strip(b, k, rows, count, job.x->f + static_cast<size_t>(row) * job.x->ld, sums);
    for (int i = 0; i < count; ++i) {
      const int columns = left - i * kPanel < kPanel ? left - i * kPanel : kPanel;
      put_tile(job, sums + i * kPanel, count * kPanel, row, rows, column + i * kPanel, columns);
    }
  }
}

}  // namespace naru

#endif
