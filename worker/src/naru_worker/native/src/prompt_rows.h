// The query rows of one prompt item while they are attended: what each sees, and its softmax so far.
//
// Scores are logarithms to base 2. A row's weights are 2^(score - top), where top need not be the largest score: it stays 0
// while scores are moderate and moves only when a weight would leave the comfortable half of float's exponents. What a row
// does depends on its own scores alone, taken in spans of fixed positions, so its numbers are the same in every item.
#pragma once

#include <cmath>

#include "attention.h"

namespace naru {

constexpr int kSpan = 64;      // tokens scored at a time, from multiples of it
constexpr int kBlockRows = 16;
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kNever = -1e30f;   // score of a token that a row may not see
constexpr float kUnset = 1e30f;    // top of a row that has seen no token
constexpr float kCalm = 40.f;      // a first span's best score within +-kCalm leaves top at 0
constexpr float kGrown = 60.f;     // from this much above top on, top moves
constexpr float kGrownSum = 0x1p59f;  // no lane of sums is above it unless a weight is near 2^kGrown

// Hands out a member's scratch; from a null base, only counts.
class Carver {
 public:
  explicit Carver(float* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <typename T>
  T* take(size_t count) {
    const uintptr_t at = base_ + taken_;
    taken_ += (count * sizeof(T) + 63) & ~size_t{63};
    return reinterpret_cast<T*>(at);
  }

  size_t floats() const { return taken_ / sizeof(float); }

 private:
  uintptr_t base_;
  size_t taken_ = 0;
};

// How far all rows of a block are.
enum BlockState : uint8_t {
  kFresh,    // some have seen no token
  kLevel,    // top is 0 in all
  kShifted,  // in some it is not
};

struct PromptRows {
  int rows;    // real ones; blocks are filled up with rows that see nothing
  int blocks;  // of kBlockRows
  int dim, padded;
  float* acc;   // [row][padded]
  float* sums;  // [row][16]: the sum of weights, in lanes
  float* next;  // [kBlockRows][16]: sums that may be dropped again
  float* top;   // [row]
  int* begin;   // [row] visible tokens [begin, end)
  int* end;
  BlockState* state;  // [block]

  void carve(Carver* from, int max_rows, int head_dim, int padded_dim) {
    const size_t r = static_cast<size_t>(round_up(max_rows, kBlockRows));
    dim = head_dim;
    padded = padded_dim;
    acc = from->take<float>(r * padded_dim);
    sums = from->take<float>(r * 16);
    next = from->take<float>(kBlockRows * 16);
    top = from->take<float>(r);
    begin = from->take<int>(r);
    end = from->take<int>(r);
    state = from->take<BlockState>(r / kBlockRows);
  }

  void start(const Attention& job, const AttentionItem& item) {
    const int group = job.num_heads / job.kv->num_heads;
    rows = item.num_tokens * group;
    blocks = round_up(rows, kBlockRows) / kBlockRows;
    const size_t all = static_cast<size_t>(blocks) * kBlockRows;
    memset(acc, 0, all * padded * sizeof(float));
    memset(sums, 0, all * 16 * sizeof(float));
    for (int i = 0, r = 0; i < item.num_tokens; ++i) {
      const int last = item.position + i + 1;
      for (int g = 0; g < group; ++g, ++r) {
        end[r] = last;
        begin[r] = job.window > 0 && last > job.window ? last - job.window : 0;
        top[r] = kUnset;
      }
    }
    for (int r = rows; r < blocks * kBlockRows; ++r) begin[r] = end[r] = 0, top[r] = 0.f;
    for (int b = 0; b < blocks; ++b) state[b] = kFresh;
  }

  int last_row(int block) const { return (block + 1) * kBlockRows < rows ? (block + 1) * kBlockRows - 1 : rows - 1; }
  int first_token(int block) const { return begin[block * kBlockRows]; }
  int end_token(int block) const { return end[last_row(block)]; }

  // Whether every row of the block sees the whole span.
  bool sees_all(int block, int span) const {
    return begin[last_row(block)] <= span && end[block * kBlockRows] >= span + kSpan;
  }

  // Bit i: row r sees token span + i.
  uint64_t seen(int r, int span) const {
    const int lo = begin[r] > span ? begin[r] - span : 0, hi = end[r] < span + kSpan ? end[r] - span : kSpan;
    if (lo >= hi) return 0;
    return (~uint64_t{0} >> (kSpan - hi)) & (~uint64_t{0} << lo);
  }

  // Row r's top for a span whose best visible score is `best`.
  float raise_top(int r, float best) {
    const float was = top[r];
    if (was == kUnset) {
      top[r] = std::fabs(best) <= kCalm ? 0.f : best;
    } else if (best - was >= kGrown) {
      top[r] = best;
      const V16 fade = set16(std::exp2(was - best));
      float* a = acc + static_cast<size_t>(r) * padded;
      for (int d = 0; d < padded; d += 16) store16(a + d, load16(a + d) * fade);
      store16(sums + r * 16, load16(sums + r * 16) * fade);
    }
    return top[r];
  }

  void update_state(int block) {
    BlockState s = kLevel;
    for (int r = block * kBlockRows; r < (block + 1) * kBlockRows; ++r) {
      if (top[r] == kUnset) s = kFresh;
      if (top[r] != 0.f && s == kLevel) s = kShifted;
    }
    state[block] = s;
  }

  void commit_sums(int block) {
    float* to = sums + block * kBlockRows * 16;
    for (int i = 0; i < kBlockRows * 16; i += 16) store16(to + i, load16(next + i));
  }

  void put(const Attention& job, const AttentionItem& item, int head) {
    const int group = job.num_heads / job.kv->num_heads;
    for (int i = 0, r = 0; i < item.num_tokens; ++i) {
      for (int g = 0; g < group; ++g, ++r) {
        const float sum = hsum16(load16(sums + r * 16));
        // sum is 0 only when every score was NaN or -inf: the row is then zero instead of NaN.
        const V16 inverse = set16(sum > 0.f ? 1.f / sum : 0.f);
        float* a = acc + static_cast<size_t>(r) * padded;
        for (int d = 0; d < padded; d += 16) store16(a + d, load16(a + d) * inverse);
        put_head(job, item.token + i, head * group + g, a);
      }
    }
  }
};

}  // namespace naru
