#include "attention.h"

#include <algorithm>

#include "attention_decode.h"
#include "attention_prompt.h"
#include "tiles.h"

namespace naru {

size_t attention_scratch_floats(int group, int padded_dim) {
  return std::max(decode_scratch_floats(group, padded_dim), prompt_scratch_floats(group, padded_dim));
}

void attention(const Attention& job, const AttentionPlan& plan, Pool* pool, int member, float* scratch) {
  const int heads = job.kv->num_heads;
  // Pieces of generated tokens are much alike: a member takes its part in order, so that it knows what comes next. Those
  // of prompts are not: the largest come first.
  const int pieces = plan.num_items * heads;
  const bool in_order = plan.num_items > 0 && plan.items[plan.num_items - 1].generated;
  Pool::Share share = in_order ? pool->share(member, pieces) : pool->queue(member, pieces);
#if defined(__AMX_TILE__)
  bool tiled = false;
#endif
  for (int i = pool->claim(&share); i >= 0; i = pool->claim(&share)) {
    const AttentionItem& item = plan.items[i / heads];
    if (item.generated) {
      const bool has_next = in_order && share.is_own() && i + 1 < share.end;
      attend_generated(job, item, i % heads, has_next ? &plan.items[(i + 1) / heads] : nullptr, (i + 1) % heads, scratch);
      continue;
    }
#if defined(__AMX_TILE__)
    if (!tiled) float_tile_shapes();
    tiled = true;
#endif
    attend_prompt(job, item, i % heads, scratch);
  }
#if defined(__AMX_TILE__)
  if (tiled) release_tiles();
#endif
}

}  // namespace naru
