// Attention of prompt tokens: many rows of one sequence at a time.
#pragma once

#include "attention.h"

namespace naru {

// Query tokens of the next item, when `num_tokens` prompt tokens of a step are left: enough that unpacking the cache costs
// little, few enough that all members find work, and fewer towards the end, so that they are done together: who waits long
// falls asleep, and waking takes long, too.
int prompt_item_tokens(int num_tokens, int num_heads, int num_kv_heads, int padded_dim, int num_members);

size_t prompt_scratch_floats(int group, int padded_dim);

// Attends an item's rows to all they see; `scratch` is prompt_scratch_floats() long, the member's own. With AMX in shapes of
// float_tile_shapes().
void attend_prompt(const Attention& job, const AttentionItem& item, int head, float* scratch);

// Kernels: in floats, in pairs of bf16 where the machine multiplies those, and in integers of 16 bits where it has nothing
// better: AVX2 multiplies these half as fast again as floats.
void attend_prompt_floats(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch);
size_t prompt_floats_scratch(int max_rows, int padded_dim);
#if defined(__AVX512BF16__)
void attend_prompt_pairs(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch);
size_t prompt_pairs_scratch(int max_rows, int padded_dim);
#elif defined(__AVX2__) && !defined(__AVX512F__)
void attend_prompt_words(const Attention& job, const AttentionItem& item, int head, int max_rows, float* scratch);
size_t prompt_words_scratch(int max_rows, int padded_dim);
#endif

}  // namespace naru
