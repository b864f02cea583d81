// Operations on single rows of activations: norms, activation functions.
#pragma once

#include <cstdint>

namespace naru {

enum NormKind : int32_t { kRms = 0, kLayerNorm = 1 };
enum ActKind : int32_t { kSwiglu = 0, kGeluTanh = 1, kGelu = 2 };

// out may be x. bias may be null.
void norm_row(const float* x, int width, const float* weight, const float* bias, float eps, int kind, float* out);

// x has 2 * width columns for kSwiglu (gate, then up), else width.
void act_row(const float* x, int width, int kind, float* out);

}  // namespace naru
