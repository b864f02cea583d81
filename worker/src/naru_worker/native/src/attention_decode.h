// Attention of generated tokens: the query heads that share a kv head are rows of one small product, which reads keys and
// values once.
#pragma once

#include "attention.h"

namespace naru {

// Rows that go through a product together; larger groups take several passes.
constexpr int kPassRows = 8;
inline int pass_rows(int rows, int first) { return rows - first < kPassRows ? rows - first : kPassRows; }

// What one kv head's queries bring to a range of tokens, whatever the format of the cache.
struct RangeJob {
  const KVCache* kv;
  int layer, head;
  int rows;  // query heads of the group
  const int32_t* blocks;
  int from, to;  // tokens, inside one range
  int limit;     // tokens whose keys this member will read afterwards end here
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

void attend_generated(const Attention& job, const AttentionItem& item, int head, float* scratch);

// Floats of scratch that a member needs.
size_t decode_scratch_floats(int group, int padded_dim);

}  // namespace naru
