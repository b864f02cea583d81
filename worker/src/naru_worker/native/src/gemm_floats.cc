// Dot products of float weights (f32, f16, bf16) with float activations, accumulated in f32 in column order.
#include "gemm.h"

namespace naru {
namespace {

template <typename T, int M>
void panel(const uint8_t* panel, int k, const FRows& x, const uint8_t* ahead, float* y) {
  const T* w = reinterpret_cast<const T*>(panel);
  vf acc[kParts][M];
  for (int part = 0; part < kParts; ++part)
    for (int m = 0; m < M; ++m) acc[part][m] = vset(0.f);
  for (int c = 0; c < k; ++c, w += kPanel) {
    if (sizeof(T) == 4 || c % 2 == 0) fetch_line(ahead + static_cast<size_t>(c) * kPanel * sizeof(T));
    vf row[kParts];
    for (int part = 0; part < kParts; ++part) row[part] = vload(w + part * kLanes);
    for (int m = 0; m < M; ++m) {
      const vf v = vset(x.x[m * x.ld + c]);
      for (int part = 0; part < kParts; ++part) acc[part][m] = row[part] * v + acc[part][m];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int part = 0; part < kParts; ++part) vstore(y + m * kPanel + part * kLanes, acc[part][m]);
}

template <typename T>
FPanel pick(int rows) {
  static const FPanel table[] = {panel<T, 1>, panel<T, 2>, panel<T, 3>, panel<T, 4>,
#if defined(__AVX512F__)
                                 panel<T, 5>, panel<T, 6>, panel<T, 7>, panel<T, 8>
#endif
  };
  return table[rows - 1];
}

}  // namespace

FPanel float_panel(int format, int rows) {
  if (format == kF32) return pick<float>(rows);
  if (format == kF16) return pick<f16>(rows);
  return pick<bf16>(rows);
}

}  // namespace naru
