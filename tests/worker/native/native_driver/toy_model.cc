#include "toy_model.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {
naru::Model* naru_model_new(naru::Device*, const naru::ModelSpec*, const double*);
void naru_model_free(naru::Model*);
int32_t naru_add_vector(naru::Model*, const float*, int32_t);
int32_t naru_add_matrix(naru::Model*, int32_t, int32_t, const int32_t*, const int32_t*, const uint8_t* const*,
                        const float*);
int32_t naru_finish(naru::Model*, const naru::BufferSpec*, int32_t, const naru::Instruction*, int32_t);
int32_t naru_step(naru::Model*, const naru::StepInputs*, const naru::SamplingInputs*, const naru::SamplingOutputs*,
                  float*, int64_t);
}

namespace {

constexpr int kLayers = 2, kInner = 512;

uint32_t next(uint32_t* state) { return *state = *state * 1664525u + 1013904223u; }

void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "%s failed\n", what);
  exit(1);
}

// Rows of a file in a format, with random quants and small scales.
std::vector<uint8_t> random_rows(int format, int rows, int columns, uint32_t* state) {
  std::vector<uint8_t> file(static_cast<size_t>(rows) * naru::file_row_bytes(format, columns));
  for (uint8_t& byte : file) byte = static_cast<uint8_t>(next(state) >> 24);
  const auto half = [&](size_t at) { file[at] = 0, file[at + 1] = 0x1c; };  // 2^-8
  if (format == naru::kF32) {
    for (size_t i = 0; i < file.size(); i += 4) {
      const float value = static_cast<float>(static_cast<int>(next(state) >> 24) - 128) / 1024.f;
      memcpy(file.data() + i, &value, 4);
    }
  } else if (format == naru::kF16 || format == naru::kBF16) {
    for (size_t i = 0; i < file.size(); i += 2) file[i + 1] = static_cast<uint8_t>((file[i + 1] & 0x83) | 0x28);
    if (format == naru::kBF16)
      for (size_t i = 0; i < file.size(); i += 2) file[i + 1] = static_cast<uint8_t>((file[i + 1] & 0x80) | 0x3c);
  } else {
    const size_t block = format == naru::kW4    ? 18
                         : format == naru::kW4M ? 20
                         : format == naru::kW8  ? 34
                         : format == naru::kW4K ? 144
                                                : 210;
    for (size_t at = 0; at < file.size(); at += block) {
      half(format == naru::kW6K ? at + 208 : at);
      if (format == naru::kW4M || format == naru::kW4K) half(at + 2);
    }
  }
  return file;
}

}  // namespace

int ToyModel::matrix(int rows, int columns, int format) {
  if (naru::is_quantized(format) && columns % (format >= naru::kW4K ? 256 : 32) != 0) format = naru::kF16;
  const std::vector<uint8_t> file = random_rows(format, rows, columns, &seed_);
  const uint8_t* data = file.data();
  const int32_t formats = format, count = rows;
  const int id = naru_add_matrix(model_, columns, 1, &formats, &count, &data, nullptr);
  check(id >= 0, "add_matrix");
  return id;
}

ToyModel::ToyModel(naru::Device* device, const Shape& shape, uint32_t seed) : shape_(shape), seed_(seed) {
  const int heads = shape.num_kv_heads * shape.group, width = heads * shape.head_dim;
  const int hidden = 256, qkv = width + 2 * shape.num_kv_heads * shape.head_dim;
  naru::ModelSpec spec{};
  spec.weight_bytes = 64 << 20;
  spec.num_layers = kLayers;
  spec.num_heads = heads;
  spec.num_kv_heads = shape.num_kv_heads;
  spec.head_dim = shape.head_dim;
  spec.vocab_size = kVocab;
  spec.block_size = kBlock;
  spec.num_blocks = kMaxLength / kBlock + 1;
  spec.kv_element_bytes = shape.kv_element_bytes;
  spec.max_num_tokens = 1024;
  spec.max_num_seqs = 4;
  spec.max_model_len = kMaxLength;
  spec.num_threads = shape.num_threads;
  spec.rotary_dim = shape.head_dim;
  spec.rope_factor = 1.f;
  std::vector<double> frequencies(static_cast<size_t>(shape.head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i)
    frequencies[i] = std::pow(10000.0, -2.0 * static_cast<double>(i) / shape.head_dim);
  model_ = naru_model_new(device, &spec, frequencies.data());
  check(model_ != nullptr, "model_new");
  const int wants_q = naru::is_quantized(shape.weight_format) ? 1 : 0;
  // x, norm, qkv, attention, gate and up, act, gathered, gathered norm
  const bool whole = width % (shape.weight_format >= naru::kW4K ? 256 : 32) == 0;
  const naru::BufferSpec buffers[] = {{hidden, 1, 0, 0, 0},        {hidden, 1, wants_q, 0, 1}, {qkv, 1, 0, 0, 0},
                                      {width, 1, whole ? wants_q : 0, 0, 1}, {2 * kInner, 1, 0, 0, 0},
                                      {kInner, 1, wants_q, 0, 1},  {hidden, 1, 0, 1, 0},       {hidden, 1, wants_q, 1, 1}};
  std::vector<naru::Instruction> tape;
  const std::vector<float> ones(static_cast<size_t>(hidden), 1.f);
  const int norm = naru_add_vector(model_, ones.data(), hidden);
  // Of its own size, so that a read behind it is found.
  const std::vector<float> head_ones(static_cast<size_t>(shape.head_dim), 1.f);
  const int head_norm = naru_add_vector(model_, head_ones.data(), shape.head_dim);
  tape.push_back({naru::kEmbed, 0, -1, matrix(kVocab, hidden, naru::kW8), -1, 0, 0, 0, 0.f, 0});
  for (int layer = 0; layer < kLayers; ++layer) {
    const int window = layer == 1 ? 100 : 0;
    const float scale = 1.f / std::sqrt(static_cast<float>(shape.head_dim));
    tape.push_back({naru::kNorm, 1, 0, norm, -1, 0, 0, 0, 1e-5f, 0});
    tape.push_back({naru::kLinear, 2, 1, matrix(qkv, hidden, shape.weight_format), -1, 0, 0, 0, 0.f, 0});
    const int normed = layer == 1 ? head_norm : -1;
    tape.push_back({naru::kRopeKV, -1, 2, normed, normed, layer, heads, 0, 1e-5f, 0});
    tape.push_back({naru::kAttention, 3, 2, -1, -1, layer, 0, window, scale, 0});
    tape.push_back({naru::kLinearAdd, 0, 3, matrix(hidden, width, shape.weight_format), -1, 0, 0, 0, 0.f, 0});
    tape.push_back({naru::kNorm, 1, 0, norm, -1, 0, 0, 0, 1e-5f, 0});
    tape.push_back({naru::kLinear, 4, 1, matrix(2 * kInner, hidden, shape.weight_format), -1, 0, 0, 0, 0.f, 0});
    tape.push_back({naru::kAct, 5, 4, -1, -1, 0, 0, 0, 0.f, 0});
    tape.push_back({naru::kLinearAdd, 0, 5, matrix(hidden, kInner, shape.weight_format), -1, 0, 0, 0, 0.f, 0});
  }
  tape.push_back({naru::kGather, 6, 0, -1, -1, 0, 0, 0, 0.f, 0});
  tape.push_back({naru::kNorm, 7, 6, norm, -1, 0, 0, 0, 1e-5f, 1});
  tape.push_back({naru::kLogits, -1, 7, matrix(kVocab, hidden, shape.weight_format), -1, 0, 0, 0, 0.f, 1});
  check(naru_finish(model_, buffers, 8, tape.data(), static_cast<int32_t>(tape.size())) == 0, "finish");
}

ToyModel::~ToyModel() { naru_model_free(model_); }

std::vector<float> ToyModel::step(int count, int length, bool generated) {
  std::vector<int32_t> ids, positions, slots, blocks;
  for (int i = length - count; i < length; ++i) {
    ids.push_back(i * 31 % kVocab);
    positions.push_back(i);
    slots.push_back(i + kBlock);
  }
  for (int b = 0; b < kMaxLength / kBlock; ++b) blocks.push_back(b + 1);
  const int32_t starts[] = {0, count}, lengths[] = {length}, rows[] = {count - 1};
  naru::StepInputs in{};
  in.num_tokens = count;
  in.num_seqs = in.num_rows = 1;
  in.max_blocks = kMaxLength / kBlock;
  in.token_ids = ids.data();
  in.positions = positions.data();
  in.slots = slots.data();
  in.query_start = starts;
  in.seq_lens = lengths;
  in.block_table = blocks.data();
  in.logits_rows = rows;
  in.num_generated_tokens = generated ? count : 0;
  std::vector<float> logits(kVocab);
  const int32_t code = naru_step(model_, &in, nullptr, nullptr, logits.data(), 20000000);
  // Weights that never come end a step that waits for some.
  check(code == 0 || code == -30 || code == -31, "step");
  return code == 0 ? logits : std::vector<float>();
}
