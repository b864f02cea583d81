#include "validate.h"

#include <cmath>

namespace naru {
namespace {

bool all_in(const int32_t* x, int64_t n, int32_t low, int32_t high) {
  bool ok = true;
  for (int64_t i = 0; i < n; ++i) ok &= x[i] >= low && x[i] < high;
  return ok;
}

// Offsets of ragged lists: from 0, never falling.
bool ragged(const int32_t* start, int rows) {
  if (start[0] != 0) return false;
  bool ok = true;
  for (int r = 0; r < rows; ++r) ok &= start[r] <= start[r + 1];
  return ok;
}

int32_t check_sequences(const ModelSpec& spec, const StepInputs& in) {
  if (in.query_start[0] != 0 || in.query_start[in.num_seqs] != in.num_tokens) return -6;
  for (int s = 0; s < in.num_seqs; ++s) {
    const int64_t begin = in.query_start[s], end = in.query_start[s + 1];
    if (begin < 0 || end <= begin || end > in.num_tokens) return -6;
    const int64_t length = in.seq_lens[s];
    if (length < end - begin || length > spec.max_model_len) return -7;
    const int64_t blocks = (length + spec.block_size - 1) / spec.block_size;
    if (blocks > in.max_blocks) return -8;
    const int32_t* table = in.block_table + static_cast<int64_t>(s) * in.max_blocks;
    if (!all_in(table, blocks, 0, spec.num_blocks)) return -9;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t position = length - end + i;
      if (in.positions[i] != position) return -4;
      // A token's slot must be where its sequence will read it.
      if (in.slots[i] / spec.block_size != table[position / spec.block_size] ||
          in.slots[i] % spec.block_size != position % spec.block_size)
        return -10;
    }
  }
  return 0;
}

int32_t check_sampling(const ModelSpec& spec, const StepInputs& in, const SamplingInputs& s) {
  const int rows = in.num_rows;
  if (s.vocab_limit < 1 || s.vocab_limit > spec.vocab_size) return -20;
  if (!all_in(s.target, rows, -1, spec.vocab_size)) return -21;
  if (!ragged(s.bias_start, rows) || !ragged(s.penalty_start, rows) || !ragged(s.banned_start, rows)) return -22;
  if (!all_in(s.bias_ids, s.bias_start[rows], 0, spec.vocab_size) ||
      !all_in(s.penalty_ids, s.penalty_start[rows], 0, spec.vocab_size) ||
      !all_in(s.banned_ids, s.banned_start[rows], 0, spec.vocab_size))
    return -23;
  if (!all_in(s.num_logprobs, rows, -1, s.max_logprobs + 1)) return -24;
  for (int r = 0; r < rows; ++r) {
    const bool finite = std::isfinite(s.temperature[r]) && std::isfinite(s.top_p[r]) && std::isfinite(s.min_p[r]) &&
                        std::isfinite(s.presence_penalty[r]) && std::isfinite(s.frequency_penalty[r]) &&
                        std::isfinite(s.repetition_penalty[r]);
    if (!finite || s.temperature[r] < 0.f || s.repetition_penalty[r] <= 0.f) return -25;
  }
  if (s.mask_rows != nullptr &&
      (!all_in(s.mask_rows, rows, -1, s.num_masks) || static_cast<int64_t>(s.mask_words) * 32 < s.vocab_limit))
    return -26;
  return 0;
}

}  // namespace

int32_t validate(const ModelSpec& spec, const StepInputs& in, const SamplingInputs* sampling) {
  if (in.num_tokens < 1 || in.num_tokens > spec.max_num_tokens) return -1;
  if (in.num_seqs < 1 || in.num_seqs > spec.max_num_seqs) return -2;
  if (!all_in(in.token_ids, in.num_tokens, 0, spec.vocab_size)) return -3;
  if (!all_in(in.slots, in.num_tokens, 0, spec.num_blocks * spec.block_size)) return -5;
  const int32_t bad = check_sequences(spec, in);
  if (bad != 0) return bad;
  for (int r = 0; r < in.num_rows; ++r)
    if (in.logits_rows[r] < 0 || in.logits_rows[r] >= in.num_tokens ||
        (r > 0 && in.logits_rows[r] <= in.logits_rows[r - 1]))
      return -11;
  bool cuts = in.num_generated_tokens == 0;
  for (int s = 0; s < in.num_seqs; ++s) cuts |= in.query_start[s + 1] == in.num_generated_tokens;
  if (!cuts) return -13;
  if (!all_in(in.copies, 2 * static_cast<int64_t>(in.num_copies), 0, spec.num_blocks)) return -12;
  return sampling == nullptr ? 0 : check_sampling(spec, in, *sampling);
}

}  // namespace naru
