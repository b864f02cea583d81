// Attention of generated tokens: the query heads that share a kv head are rows of one small product, which reads keys and
// values once.
#pragma once

#include "attention.h"

namespace naru {

// Rows that go through a product together; larger groups take several passes.
constexpr int kPassRows = 8;
inline int pass_rows(int rows, int first) { return rows - first < kPassRows ? rows - first : kPassRows; }

// The range that the member works on afterwards, as far as it is known.
struct NextRange {
  const int32_t* blocks = nullptr;
  int head = 0;
  int shift = 0;  // from a token of the present range to the one in its place there
  int to = 0;     // its tokens end here; 0: none follows
};

// What one kv head's queries bring to a range of tokens, whatever the format of the cache.
struct RangeJob {
  const KVCache* kv;
  int layer, head;
  int rows;  // query heads of the group
  const int32_t* blocks;
  int from, to;  // tokens, inside one range
  NextRange next;

  // Where keys or values lie that are read as long after token `c` as a range takes: asked for now, they are there then.
  // Memory answers late, and a core has few requests under way: what is asked for only when it is needed is waited for.
  // `token_bytes`: what one token takes of its block. Where nothing follows, the address is that of `c` itself.
  NARU_INLINE const uint8_t* ahead(bool of_values, int c, size_t token_bytes) const {
    const int later = c + next.shift;
    const bool follows = later < next.to;
    const int token = follows ? later : c;
    const size_t block = static_cast<size_t>((follows ? next.blocks : blocks)[token / kv->block_size]) * kv->block_bytes();
    const int of = follows ? next.head : head;
    return (of_values ? kv->values(layer, of) : kv->keys(layer, of)) + block + token % kv->block_size * token_bytes;
  }
};

// Attends to tokens [from, to) and writes what range_rows_floats() tells of. `q` holds passes of [dim][rows of the pass], scaled so that weights
// are powers of two; `scores` kRangeTokens floats for each row.
void range_of_floats(const RangeJob& job, const float* q, float* scores, float* result);

// Queries for a cache of bytes: passes of [dim / 4][rows of the pass][2] words, and per row the unit of its numbers and
// what the 128 in each byte adds to a sum.
struct ByteQueries {
  int32_t* words;
  int32_t* shift;
  float* unit;
};

// From rows of `padded` floats, scaled as above.
void put_byte_queries(const float* q, int rows, int padded, const ByteQueries& to);

// The same of a cache of bytes.
void range_of_bytes(const RangeJob& job, const ByteQueries& q, float* scores, float* result);

// Adds the rows of one range to those so far.
void fold_rows(int rows, int padded, const float* range, float* so_far);

// Turns scores of tokens [from, to), the first at `scores[0]`, into weights; those before or behind become 0. Gives the
// largest score and the sum of weights.
void soften_row(float* scores, int count, int skip, int width, float* top, float* sum);

// `next` and `next_head`: what the member attends to afterwards, or null.
void attend_generated(const Attention& job, const AttentionItem& item, int head, const AttentionItem* next, int next_head,
                      float* scratch);

// Floats of scratch that a member needs.
size_t decode_scratch_floats(int group, int padded_dim);

}  // namespace naru
