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
  Pool::Share share = pool->queue(member, plan.num_items * heads);
#if defined(__AMX_TILE__)
  bool tiled = false;
#endif
  for (int i = pool->claim(&share); i >= 0; i = pool->claim(&share)) {
    const AttentionItem& item = plan.items[i / heads];
    if (item.generated) {
      attend_generated(job, item, i % heads, scratch);
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
