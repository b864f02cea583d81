// Causal attention over the paged cache, with online softmax.
#pragma once

#include "activations.h"
#include "kv.h"
#include "threads.h"

namespace naru {

// A run of query tokens of one sequence, for all layers of a step: the unit that is multiplied by kv heads.
struct AttentionItem {
  int token;         // first row in the chunk's activations
  int num_tokens;    // 1 when generated
  int position;      // of the first token
  const int32_t* blocks;
  bool generated;    // sums over fixed ranges of tokens; else over all of them in one go
  int split;         // which range, of
  int num_splits;    // 1: all of them
  int partial;       // first slot of the partial results (kv head and split are added)
};

struct AttentionPlan {
  const AttentionItem* items;
  int num_items;
};

// A generated token's attention is the sum of those over ranges of this many tokens, taken in order. The ranges are fixed,
// so that it makes no difference to the result whether one member walks them all or several share them.
constexpr int kRangeTokens = 128;
inline int num_ranges(int position) { return position / kRangeTokens + 1; }

// Members share a token's ranges when there are fewer tokens times kv heads than this for each member.
constexpr int kSpreadTasks = 4;

struct Attention {
  const float* q;  // rows of num_heads * head_dim, stride ldq
  size_t ldq;
  int num_heads;
  const KVCache* kv;
  int layer;
  float scale;
  int window;  // 0: full
  float* out;  // rows of num_heads * head_dim, stride ldo
  size_t ldo;
  float* partials;            // [slot][range_rows_floats(group, padded_dim)]
  std::atomic<int>* pending;  // at the first slot of a token and kv head: how many of its ranges are done
  // Not null: results go here, in the forms that are wanted, instead of to `out`. Heads are whole groups then.
  const Activations* to = nullptr;
  int first_tile_row = 0;  // of `to`: rows from here on become tiles
};

// A query head's result for row `token`.
inline void put_head(const Attention& job, int token, int head, const float* x) {
  const int dim = job.kv->head_dim;
  if (job.to == nullptr)
    memcpy(job.out + static_cast<size_t>(token) * job.ldo + static_cast<size_t>(head) * dim, x, dim * sizeof(float));
  else
    emit_part(*job.to, token, head * dim, dim, x, token < job.first_tile_row ? kNoTileRow : token - job.first_tile_row);
}

// Inside a pool job, by all members; no barrier. `scratch` is the member's own, attention_scratch_floats() long.
void attention(const Attention& job, const AttentionPlan& plan, Pool* pool, int member, float* scratch);

size_t attention_scratch_floats(int group, int padded_dim);

// Floats of what is known of some rows after a range of tokens: per row the weighted sums of values, the largest score
// and the sum of weights.
inline size_t range_row_floats(int padded_dim) { return static_cast<size_t>(padded_dim) + 16; }
inline size_t range_rows_floats(int rows, int padded_dim) { return static_cast<size_t>(rows) * range_row_floats(padded_dim); }

}  // namespace naru
