// Whether this machine computes what its flags promise: a few products whose results are known, one number as verdict.
//
// Run in a process of its own, for an instruction that is not there ends it.
#include <cmath>
#include <new>
#include <vector>

#include "model.h"
#include "rowops.h"

extern "C" int32_t naru_linear(naru::Model* m, int32_t matrix, const float* x, int32_t rows, float* out, int32_t repeats);

namespace naru {
namespace {

constexpr int kColumns = 256, kOutputs = 40, kMostRows = 40;
constexpr uint16_t kOne = 0x3c00, kMinusThree = 0xc200;  // as f16

// Whole numbers, so that sums are exact: in [0, 16).
int digit(int row, int column) { return static_cast<int>(static_cast<uint32_t>(row * 7919 + column * 104729) >> 3 & 15); }

// A group's largest activation is 127, so that its scale is 1.
float activation(int row, int column) { return column % kGroup == 0 ? 127.f : static_cast<float>(digit(row, column) - 8); }

float weight(int format, int row, int column) {
  const int q = digit(row + 100, column);
  return static_cast<float>(format == kW4M ? q - 3 : q - 8);
}

void put_half(std::vector<uint8_t>* file, uint16_t value) {
  file->push_back(static_cast<uint8_t>(value));
  file->push_back(static_cast<uint8_t>(value >> 8));
}

// The matrix as a file has it.
std::vector<uint8_t> file_of(int format) {
  static const uint16_t kHalves[] = {0xc800, 0xc700, 0xc600, 0xc500, 0xc400, 0xc200, 0xc000, 0xbc00,
                                     0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700};  // -8 .. 7
  std::vector<uint8_t> file;
  for (int r = 0; r < kOutputs; ++r) {
    for (int c = 0; c < kColumns; c += kGroup) {
      if (format != kF16) put_half(&file, kOne);
      if (format == kW4M) put_half(&file, kMinusThree);
      for (int i = 0; i < kGroup; ++i) {
        const int q = digit(r + 100, c + i);
        if (format == kF16) put_half(&file, kHalves[q]);
        if (format == kW8) file.push_back(static_cast<uint8_t>(q - 8));
        if ((format == kW4 || format == kW4M) && i < 16)
          file.push_back(static_cast<uint8_t>(q | digit(r + 100, c + i + 16) << 4));
      }
    }
  }
  return file;
}

// One number after the other, whatever the library is compiled for.
__attribute__((optimize("no-tree-vectorize"))) bool is_right(int format, int row, int output, float found) {
  float sum = 0.f, size = 0.f;
  for (int c = 0; c < kColumns; ++c) {
    const float product = activation(row, c) * weight(format, output, c);
    sum += product;
    size += std::fabs(product);
  }
  return std::fabs(found - sum) <= size * 1e-3f;
}

bool computes(Device* device, int format) {
  ModelSpec spec{};
  spec.weight_bytes = 1 << 20;
  spec.num_layers = spec.num_heads = spec.num_kv_heads = spec.num_threads = spec.max_num_seqs = 1;
  spec.head_dim = spec.vocab_size = spec.block_size = spec.max_num_tokens = spec.max_model_len = 16;
  spec.num_blocks = spec.kv_element_bytes = 2;
  Model model(spec, nullptr, device);
  if (!model.reserve()) return true;  // no memory: nothing was found wrong
  const std::vector<uint8_t> file = file_of(format);
  const uint8_t* data = file.data();
  const int32_t rows = kOutputs;
  const int matrix = model.add_matrix(kColumns, 1, &format, &rows, &data, nullptr);
  if (matrix < 0) return false;
  std::vector<float> x(kMostRows * kColumns), out(kMostRows * kOutputs);
  for (int r = 0; r < kMostRows; ++r)
    for (int c = 0; c < kColumns; ++c) x[r * kColumns + c] = activation(r, c);
  for (int count : {1, 3, 16, kMostRows}) {
    if (naru_linear(&model, matrix, x.data(), count, out.data(), 1) != 0) return false;
    for (int i = 0; i < count * kOutputs; ++i)
      if (!is_right(format, i / kOutputs, i % kOutputs, out[i])) return false;
  }
  return true;
}

// SiLU of what is gated by ones: exponentials and divisions.
bool activates() {
  float x[64], y[32];
  for (int i = 0; i < 32; ++i) {
    x[i] = static_cast<float>(i - 16);
    x[32 + i] = 1.f;
  }
  act_row(x, 32, kSwiglu, y);
  for (int i = 0; i < 32; ++i) {
    const float silu = x[i] / (1.f + std::exp(-x[i]));
    if (!(std::fabs(y[i] - silu) <= 1e-4f + std::fabs(silu) * 1e-3f)) return false;
  }
  return true;
}

}  // namespace

int self_test() {
  Device* device = new (std::nothrow) Device(1);
  if (device == nullptr || !device->reserve()) return 0;
  int failures = activates() ? 0 : 16;
  const int formats[] = {kF16, kW4, kW4M, kW8};
  for (int i = 0; i < 4; ++i)
    if (!computes(device, formats[i])) failures |= 1 << i;
  delete device;
  return failures;
}

}  // namespace naru

// 0: all is right; else a bit for each kernel that was wrong (f16, q4_0, q4_1, q8_0, activations).
extern "C" __attribute__((visibility("default"))) int32_t naru_self_test(void) { return naru::self_test(); }
