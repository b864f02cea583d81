#include "attention_prompt.h"

#include <algorithm>

#include "prompt_rows.h"

namespace naru {
namespace {

constexpr int kItemFloats = 49152;  // of sums of values, an item's largest part of the second cache
constexpr int kItemsPerMember = 3;  // of what is left
constexpr int kLeastItemTokens = 64;

// Weights far below a row's best are 0, not denormal: those take a hundred times as long. Not for longer than an item: what
// else the member computes must not depend on it.
class FlushDenormals {
 public:
  FlushDenormals() : control_(_mm_getcsr()) { _mm_setcsr(control_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(control_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned control_;
};

int max_rows(int group, int padded_dim) { return std::max(group, kItemFloats / padded_dim / kBlockRows * kBlockRows); }

}  // namespace

int prompt_item_tokens(int num_tokens, int num_heads, int num_kv_heads, int padded_dim, int num_members) {
  const int group = num_heads / num_kv_heads;
  const int most = std::max(1, max_rows(group, padded_dim) / group);
  const int items = std::max(1, kItemsPerMember * num_members / num_kv_heads);
  return std::min(most, std::max(kLeastItemTokens, round_up((num_tokens + items - 1) / items, kBlockRows)));
}

size_t prompt_scratch_floats(int group, int padded_dim) {
  const int rows = max_rows(group, padded_dim);
  size_t n = prompt_floats_scratch(rows, padded_dim);
#if defined(__AVX512BF16__)
  n = std::max(n, prompt_pairs_scratch(rows, padded_dim));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  n = std::max(n, prompt_words_scratch(rows, padded_dim));
#endif
  return n;
}

void attend_prompt(const Attention& job, const AttentionItem& item, int head, float* scratch) {
  const KVCache& kv = *job.kv;
  const int rows = max_rows(job.num_heads / kv.num_heads, kv.padded_dim);
  const FlushDenormals flush;
#if defined(__AVX512BF16__)
  // A float cache asks for float arithmetic.
  if (kv.element_bytes != 4) return attend_prompt_pairs(job, item, head, rows, scratch);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  if (kv.element_bytes != 4) return attend_prompt_words(job, item, head, rows, scratch);
#endif
  attend_prompt_floats(job, item, head, rows, scratch);
}

}  // namespace naru
