// Where a step's buffers lie in the workspace. The same walk tells how much a model will need before it is loaded and
// places its buffers when it is: it depends on the model's sizes alone, not on the formats of its weights.
#pragma once

#include <vector>

#include "activations.h"
#include "attention.h"
#include "model_spec.h"

namespace naru {

struct Buffer {
  Activations a;
  bool gathered = false;  // holds rows of logits
  bool fed = false;       // read by a linear layer, hence perhaps in quantized form
};

struct Layout {
  int chunk_tokens = 0;  // most tokens that go through the tape at once
  int chunk_rows = 0;    // most rows whose logits exist at once
  size_t scratch_stride = 0;  // floats of one member
  float* logits = nullptr;
  float* rope = nullptr;
  float* scratch = nullptr;
  float* partials = nullptr;
  std::atomic<int>* pending = nullptr;
  AttentionItem* items = nullptr;
  size_t bytes = 0;
};

Buffer make_buffer(const BufferSpec& spec);

// Places buffers and the rest from `base`, which may be null when only `bytes` is asked for.
Layout lay_out(const ModelSpec& spec, std::vector<Buffer>* buffers, uint8_t* base);

}  // namespace naru
