// A loaded encoder: layers that look both ways over packed sequences, and a pooled vector, or scores, for each.
//
// Sequences lie one after the other without padding and go through the layers in chunks of whole sequences, so that
// activations stay in the L2 cache. Where there is enough to do, each thread takes chunks of its own, and nothing waits;
// else all threads share each layer of one. Each sum is taken in an order of its own sequence's alone: a result does not
// depend on its batch mates nor on the number of threads. Threads and activations are the device's.
#pragma once

#include <vector>

#include "arena.h"
#include "device.h"
#include "encoder_math.h"

namespace naru {

// Mirrored by the Python side, field by field.
struct EncoderSpec {
  int32_t num_layers;
  int32_t num_heads;
  int32_t head_dim;
  int32_t hidden;
  int32_t inner;
  int32_t vocab_size;
  int32_t num_positions;   // rows of the position table
  int32_t first_position;  // row of a sequence's first token
  int32_t num_types;       // rows of the token type table; 0: there is none
  int32_t act;             // of the MLP
  int32_t pooling;
  int32_t num_labels;      // 0: the pooled vector is the result
  int32_t head_act;        // of the dense layer before the labels
  int32_t max_len;
  int32_t num_threads;     // of the device
  float eps;
};

enum Pooling : int32_t { kPoolMean = 0, kPoolFirst = 1, kPoolMax = 2, kPoolMeanSqrt = 3, kPoolLast = 4 };

struct EncoderInputs {
  int32_t num_seqs;
  const int32_t* starts;       // (num_seqs + 1) first token of each; last is the number of tokens
  const int32_t* token_ids;
  const int32_t* token_types;  // null: all 0
};

// Tensors in the order in which they are put in. Those of layer i start at kLayerTensors * i + kFirstLayer.
enum EncoderTensor : int32_t {
  kWords = 0,
  kPositions = 1,
  kTypes = 2,
  kEmbedNorm = 3,
  kEmbedNormBias = 4,
  kHeadDense = 5,
  kHeadDenseBias = 6,
  kHeadOut = 7,
  kHeadOutBias = 8,
  kFirstLayer = 9,
};
enum LayerTensor : int32_t {
  kQkv = 0,
  kQkvBias = 1,
  kOut = 2,
  kOutBias = 3,
  kAttnNorm = 4,
  kAttnNormBias = 5,
  kUp = 6,
  kUpBias = 7,
  kDown = 8,
  kDownBias = 9,
  kMlpNorm = 10,
  kMlpNormBias = 11,
  kLayerTensors = 12,
};

class Encoder {
 public:
  Encoder(const EncoderSpec& spec, Device* device) : spec_(spec), device_(*device), pool_(device->pool()) {}
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  // Bytes of all weights as they lie in memory, and of the workspace.
  static size_t weight_bytes(const EncoderSpec& spec);
  static size_t workspace_bytes(const EncoderSpec& spec);

  // Takes memory for the weights and claims the workspace. False: not enough.
  bool reserve();

  // Takes a tensor over, in whatever form it is computed with; float32, rows x columns. False: no such tensor.
  bool put(int tensor, const float* values);

  // Number of the first broken rule, or 0; and the encoding itself, of inputs that keep them.
  int validate(const EncoderInputs& in) const;
  void encode(const EncoderInputs& in, float* out);

 private:
  struct Norm {
    float* weight = nullptr;
    float* bias = nullptr;
  };
  struct Layer {
    Weight qkv, out, up, down;
    Norm attn, mlp;
  };
  // Activations of one chunk.
  struct Work {
    float* x = nullptr;      // (rows, hidden) what the next part adds to
    float* y = nullptr;      // (rows, hidden) its sum, before the norm
    Element* qkv = nullptr;  // (rows, 3 hidden)
    Left xl, al, hl;         // left operands: normed rows, attention's, the MLP's
  };
  // Whole sequences that go through the layers together.
  struct Chunk {
    int first_seq, end_seq, first, rows;
  };
  // One chunk, those who compute it, and where.
  struct Pass {
    Chunk chunk;
    Crew crew;
    Work work;
    float* scratch;  // the member's own
  };

  static size_t lay_out(const EncoderSpec& spec, uint8_t* base, std::vector<Work>* works, std::vector<float*>* scratch);
  static void job(void* self, int member);
  void plan();
  void run(int member);
  void run_chunk(Pass* pass);
  void embed(Pass* pass);
  void layer(const Layer& w, const Layer& next, Pass* pass);
  void norm_rows(const Norm& norm, Pass* pass);
  void pool_rows(Pass* pass);
  void head(const float* pooled, float* scratch, float* out) const;
  void add_table_row(const Table& table, int row, float* x) const;

  EncoderSpec spec_;
  Device& device_;
  Pool& pool_;
  Arena arena_;
  Table words_, positions_, types_;
  Norm embed_norm_;
  float *head_dense_ = nullptr, *head_dense_bias_ = nullptr, *head_out_ = nullptr, *head_out_bias_ = nullptr;
  std::vector<Layer> layers_;
  std::vector<Work> works_;      // one for each thread
  std::vector<float*> scratch_;
  std::vector<Chunk> chunks_;    // of the batch under way
  bool each_alone_ = false;      // each thread takes chunks of its own
  EncoderInputs in_{};
  float* out_ = nullptr;
};

}  // namespace naru
