// A loaded model: weights, KV cache and the tape that a step replays. Threads and activations are the device's.
#pragma once

#include <vector>

#include "arena.h"
#include "device.h"
#include "gemm.h"
#include "kv.h"
#include "layout.h"
#include "matrix.h"
#include "model_spec.h"
#include "readiness.h"
#include "sampler.h"

namespace naru {

class Model {
 public:
  // The device outlives the model.
  Model(const ModelSpec& spec, const double* inverse_frequency, Device* device);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Reserves memory for weights to be packed and addresses for the KV cache. False: not enough.
  bool reserve();

  // Copies.
  int add_vector(const float* values, int n);
  int add_matrix(int k, int num_parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data,
                 const float* bias);

  // Reads where they lie, packed; `end` is where the last of their bytes ends in the image.
  int add_vector_view(const float* values, uint64_t end);
  int add_matrix_view(int k, int num_parts, const int32_t* formats, const int32_t* rows, uint8_t* const* data,
                      float* bias, uint64_t end);

  // Places the buffers and takes the tape over; called once. False: the workspace is too small.
  bool finish(const BufferSpec* buffers, int num_buffers, const Instruction* tape, int count);

  // One step; sampling may be null, logits may be null. Inputs were validated. Waits at most `max_wait_ns` for weights
  // that are not present yet; unless it returns kReady, nothing was drawn, and the step may be run again.
  Readiness::State step(const StepInputs& in, const SamplingInputs* sampling, const SamplingOutputs* out, float* logits,
                        int64_t max_wait_ns);

  Device& device() { return device_; }
  Readiness& readiness() { return readiness_; }
  const ModelSpec& spec() const { return spec_; }
  const KVCache& kv() const { return kv_; }
  const Matrix& matrix(int id) const { return *matrices_[id]; }
  Arena& kv_arena() { return kv_arena_; }
  size_t workspace_bytes() const { return layout_.bytes; }

 private:
  struct Vector {
    const float* values;
    uint64_t end;
  };
  static void job(void* self, int member);
  void run(int member);
  bool run_chunk(int member, int first, int count);
  bool run_rows(int member, int first, int count);
  bool await_weights(int member, uint64_t needed);
  uint64_t needed_by(const Instruction& op) const;
  const Activations* gated_by(size_t index) const;
  Matrix* new_matrix(int k);
  Segment* add_segment(Matrix* w, int format, int rows);
  void execute(size_t index, int member, int first, int rows);
  void run_linear(const Linear& job, int generated, int member);
  void plan_attention(int first, int count);
  void prepare_chunk(int member, int first, int count);
  void copy_blocks(int member);
  void gather(int member, int row, int count, int at, int first);
  // Of a vector; null where an instruction has none.
  const float* values_of(int id) const { return id < 0 ? nullptr : vectors_[id].values; }
  uint64_t end_of(int id) const { return id < 0 ? 0 : vectors_[id].end; }
  float* member_scratch(int member) { return layout_.scratch + static_cast<size_t>(member) * layout_.scratch_stride; }

  ModelSpec spec_;
  std::vector<double> inverse_frequency_;
  Device& device_;
  Pool& pool_;
  Arena weights_, kv_arena_;
  KVCache kv_;
  std::vector<Matrix*> matrices_;
  std::vector<std::vector<float>> copied_;
  std::vector<Vector> vectors_;
  std::vector<Buffer> buffers_;
  std::vector<Instruction> tape_;
  std::vector<const Matrix*> then_;  // per instruction: the matrix that the next linear layer reads
  std::vector<const Activations*> gated_;  // per linear layer: where its gated activation goes, in tiles; may be null
  std::vector<uint64_t> needed_;     // per instruction: bytes of the image that must be present
  uint64_t needed_in_all_ = 0;
  Layout layout_;
  std::atomic<int> num_items_{0};  // of the attention plan; a member that is late may see a later chunk's

  StepInputs in_{};
  const SamplingInputs* sampling_ = nullptr;
  const SamplingOutputs* out_ = nullptr;
  float* logits_out_ = nullptr;

  Readiness readiness_;
  int64_t deadline_ns_ = 0;
  uint64_t present_ = 0;  // when the step began
  std::atomic<Readiness::State> state_{Readiness::kReady};
};

}  // namespace naru
