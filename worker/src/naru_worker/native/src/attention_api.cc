// The C interface of attention alone, over a model's cache: for tests and the kernel benchmark.
#include <algorithm>
#include <vector>

#include "attention_prompt.h"
#include "model.h"

#define NARU_API extern "C" __attribute__((visibility("default")))

namespace {

struct PromptCall {
  naru::Attention job;
  naru::AttentionPlan plan;
  naru::Pool* pool;
  float* scratch;
  size_t scratch_stride;
  int repeats;
};

void prompt_call(void* ctx, int member) {
  const PromptCall& c = *static_cast<PromptCall*>(ctx);
  for (int i = 0; i < c.repeats; ++i) {
    naru::attention(c.job, c.plan, c.pool, member, c.scratch + member * c.scratch_stride);
    c.pool->barrier(member);
  }
}

}  // namespace

// Attends `num_tokens` prompt tokens from `position` on to themselves and all before them in `blocks`, in layer 0,
// `repeats` times. q and out (num_tokens, num_heads * head_dim). -1: not enough memory.
NARU_API int32_t naru_attend_prompt(naru::Model* m, const float* q, int32_t num_tokens, int32_t position, int32_t window,
                                    const int32_t* blocks, float scale, float* out, int32_t repeats) {
  const naru::ModelSpec& spec = m->spec();
  const naru::KVCache& kv = m->kv();
  naru::Pool& pool = m->device().pool();
  const size_t stride =
      (naru::attention_scratch_floats(spec.num_heads / spec.num_kv_heads, kv.padded_dim) + 15) / 16 * 16;
  naru::Arena arena;
  if (!arena.reserve(pool.size() * stride * sizeof(float) + 64)) return -1;
  std::vector<naru::AttentionItem> items;
  for (int t = num_tokens; t > 0;) {
    const int tile = std::min(
        t, naru::prompt_item_tokens(t, spec.num_heads, spec.num_kv_heads, kv.padded_dim, pool.size()));
    t -= tile;
    items.push_back({t, tile, position + t, blocks, false, 0, 1, 0});
  }
  const size_t ld = static_cast<size_t>(spec.num_heads) * spec.head_dim;
  PromptCall call{{q, ld, spec.num_heads, &kv, 0, scale, window, out, ld, nullptr, nullptr},
                  {items.data(), static_cast<int>(items.size())},
                  &pool,
                  reinterpret_cast<float*>(arena.take(pool.size() * stride * sizeof(float))),
                  stride,
                  repeats};
  m->device().run(prompt_call, &call);
  return 0;
}
