// Sampling from raw logits. Mirrors the plain reference of the Python side, step for step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace naru {

struct SamplingInputs {
  int32_t vocab_limit;
  int32_t max_logprobs;  // width of top_ids and top_logprobs
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const float* presence_penalty;
  const float* frequency_penalty;
  const float* repetition_penalty;
  const uint64_t* seed;
  const uint64_t* counter;
  const int32_t* target;
  const int32_t* num_logprobs;
  const int32_t* bias_start;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* penalty_start;
  const int32_t* penalty_ids;
  const int32_t* penalty_counts;
  const int32_t* banned_start;
  const int32_t* banned_ids;
  // Token masks, which another thread may still be writing. Null mask_rows: no row has one.
  const int32_t* mask_rows;  // row of `masks`, -1: none
  const uint32_t* masks;     // [num_masks, mask_words]; bit i % 32 of word i / 32: token i may be drawn
  int32_t* mask_gate;        // 0; 1 when the masks are written, -1 when they took too long for a row
  int32_t num_masks;
  int32_t mask_words;
  int32_t mask_wait_ms;  // rows are given up, with token -1, when their masks take longer; all wait this long together
};

struct SamplingOutputs {
  int32_t* token_ids;
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
  float* hidden;  // each row after the final norm, (rows, hidden size); null: not asked for
};

// Uniform in [0, 1) with 53 bits, a function of seed and counter alone.
double uniform(uint64_t seed, uint64_t counter);

// Bytes of scratch that sample_row needs.
size_t sampler_scratch_bytes(int vocab);

// Samples or scores row `row`; logits has `vocab` entries and is not changed. Waits for the masks where the row has one.
void sample_row(const SamplingInputs& in, const SamplingOutputs& out, int row, const float* logits, int vocab,
                uint8_t* scratch);

}  // namespace naru
