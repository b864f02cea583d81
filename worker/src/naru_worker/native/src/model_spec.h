// What the caller tells of a model and of a step. Mirrored by the Python side, field by field.
#pragma once

#include <cstdint>

namespace naru {

struct ModelSpec {
  int64_t weight_bytes;  // to be packed; 0 when weights lie in an image
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
  int32_t num_threads;  // of the device
  int32_t rotary_dim;   // 0: no rotation
  float rope_factor;
};

// Activations between operations.
struct BufferSpec {
  int32_t width;
  int32_t wants_f;   // someone reads floats
  int32_t wants_q;   // someone reads the quantized form
  int32_t gathered;  // rows are those of logits
  int32_t fed;       // read by a linear layer
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
  int32_t weight;  // of kRopeKV: the norm of each head's query, a vector; -1: none
  int32_t bias;    // -1: none; of kRopeKV: the norm of each head's key
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

}  // namespace naru
