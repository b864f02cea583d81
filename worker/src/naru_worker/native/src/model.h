// A loaded model: weights, KV cache, activations, threads and the tape that a step replays.
#pragma once

#include <vector>

#include "activations.h"
#include "arena.h"
#include "attention.h"
#include "gemm.h"
#include "kv.h"
#include "matrix.h"
#include "sampler.h"
#include "threads.h"

namespace naru {

// Mirrored by the Python side, field by field.
struct ModelSpec {
  int64_t weight_bytes;
  int32_t num_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t vocab_size;
  int32_t block_size;
  int32_t num_blocks;
  int32_t kv_element_bytes;
  int32_t max_num_tokens;
  int32_t max_num_seqs;
  int32_t max_model_len;
  int32_t num_threads;
  int32_t rotary_dim;  // 0: no rotation
  float rope_factor;
};

enum OpCode : int32_t {
  kEmbed = 0,
  kAddPositions = 1,
  kNorm = 2,
  kLinear = 3,
  kLinearAdd = 4,
  kRopeKV = 5,
  kAttention = 6,
  kAct = 7,
  kGather = 8,
  kLogits = 9,
};

// One recorded operation. Ids are indices into the model's buffers, matrices and vectors.
struct Instruction {
  int32_t op;
  int32_t dst;
  int32_t src;
  int32_t weight;
  int32_t bias;  // -1: none
  int32_t layer;
  int32_t kind;
  int32_t window;  // 0: full
  float value;     // eps or scale
  int32_t tail;    // 1: works on the gathered rows, once per batch of logits rows
};

struct StepInputs {
  int32_t num_tokens;
  int32_t num_seqs;
  int32_t num_rows;
  int32_t num_copies;
  int32_t max_blocks;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const int32_t* logits_rows;
  const int32_t* copies;
  int32_t num_generated_tokens;  // the first so many tokens; the rest belong to prompts
};

class Model {
 public:
  Model(const ModelSpec& spec, const double* inverse_frequency);

  // Reserves weights and KV cache. False: not enough memory.
  bool reserve();
  // Makes the activation buffers; called once, when the tape is complete.
  bool finish(const Instruction* tape, int count);

  int add_vector(const float* values, int n);
  int add_matrix(int k, int num_parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data,
                 const float* bias);
  int add_buffer(int width, bool wants_f, bool wants_q, bool gathered);

  // One step; sampling may be null, logits may be null. Inputs were validated.
  void step(const StepInputs& in, const SamplingInputs* sampling, const SamplingOutputs* out, float* logits);

  Pool& pool() { return pool_; }
  const ModelSpec& spec() const { return spec_; }
  const Matrix& matrix(int id) const { return *matrices_[id]; }
  Arena& weights() { return weights_; }
  Arena& kv_arena() { return kv_arena_; }
  size_t activation_bytes() const { return activations_.size(); }

 private:
  struct Buffer {
    Activations a;
    bool gathered;
  };
  static void job(void* self, int member);
  void run(int member);
  void run_chunk(int member, int first, int count);
  void run_rows(int member, int first, int count);
  void execute(size_t index, int member, int first, int rows);
  void run_linear(const Linear& job, int generated, int member);
  void plan_attention(int first, int count);
  void rope_tables(int member, int first, int count);
  void copy_blocks(int member);
  void gather(int member, int row, int count, int at, int first);
  float* member_scratch(int member) { return scratch_ + static_cast<size_t>(member) * scratch_stride_; }

  ModelSpec spec_;
  std::vector<double> inverse_frequency_;
  Arena weights_, kv_arena_, activations_;
  KVCache kv_;
  Pool pool_;
  std::vector<Matrix*> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Buffer> buffers_;
  std::vector<Instruction> tape_;
  std::vector<const Matrix*> then_;  // per instruction: the matrix that the next linear layer reads

  int chunk_tokens_ = 0;  // most tokens that go through the tape at once
  int chunk_rows_ = 0;    // most rows whose logits exist at once
  float* logits_ = nullptr;
  float* rope_ = nullptr;
  float* scratch_ = nullptr;
  size_t scratch_stride_ = 0;
  size_t sampler_stride_ = 0;
  float* partials_ = nullptr;
  std::atomic<int>* pending_ = nullptr;
  AttentionPlan plan_;

  StepInputs in_{};
  const SamplingInputs* sampling_ = nullptr;
  const SamplingOutputs* out_ = nullptr;
  float* logits_out_ = nullptr;

 public:
  ~Model();
};

}  // namespace naru
