// Products of an encoder, in the form that is fastest here: bf16 tiles where there are some (encoder_tiles.cc), else
// floats (encoder_floats.cc). Sums are always floats.
#pragma once

#include "gemm.h"
#include "rowops.h"
#include "threads.h"

namespace naru {

#if defined(__AMX_TILE__)
using Element = bf16;
#else
using Element = float;
#endif

enum EncoderAct : int32_t { kEncoderGeluTanh = 1, kEncoderGelu = 2, kEncoderRelu = 3, kEncoderTanh = 4 };

// Columns of operands are padded to whole tiles, with zeros.
constexpr int kStep = 32;
inline int padded(int width) { return round_up(width, kStep); }

// Members that compute together: all of a pool, or one alone.
struct Crew {
  Pool* pool;  // null: alone
  int member;
  int size;
  Pool::Share share{};  // alone: [begin, end) is left

  // Begins a section of `n` pieces, which are taken in order.
  void begin(int n) {
    if (pool != nullptr)
      share = pool->queue(member, n);
    else
      share.begin = 0, share.end = n;
  }
  // The next piece, -1 when none is left.
  int next() {
    if (pool != nullptr) return pool->claim(&share);
    return share.begin < share.end ? share.begin++ : -1;
  }
  void barrier() {
    if (pool != nullptr) pool->barrier(member);
  }
};

// Left operands: tiles [row / 16][column / 32][16][32], or rows of `padded(width)` floats. Memory for whole tiles.
struct Left {
  Element* data = nullptr;
  int width = 0;
};
constexpr int kLeftRows = 32;  // operands have a multiple of so many rows
inline size_t left_elements(int rows, int width) {
  return static_cast<size_t>(round_up(rows, kLeftRows)) * static_cast<size_t>(padded(width));
}

// Puts row `row`, whose columns behind the width are zeros up to whole tiles.
void put_left(const Left& to, int row, const float* x);

// Zeroes what lies behind the width, which no other function writes.
void clear_padding(const Left& to, int rows);

// Weights: panels of 16 outputs, and a bias. `data` may be null when only sizes are asked for.
struct Weight {
  Element* data = nullptr;
  float* bias = nullptr;   // 32 more than outputs, zeroed
  int n = 0;
  int k = 0;
};
size_t weight_elements(int n, int k);
void pack_weight(const Weight& w, const float* rows);

// A table whose rows are looked up.
struct Table {
  Element* data = nullptr;
  int rows = 0;
  int width = 0;
};
void pack_table(const Table& t, const float* rows);

enum class Then { kRows, kAdd, kAct };

// out = x W^T + bias. Then: kRows puts it to `rows_out`; kAdd adds `residual` and puts it to `out`; kAct goes through the
// activation, to `left`.
struct Product {
  const Weight* w;
  const Weight* next;  // what is multiplied next, fetched towards the end
  Left x;
  int rows;
  Then then;
  int act;
  float* out;
  const float* residual;
  size_t ld;  // of rows_out, or of out and residual
  Element* rows_out;
  Left left;
};

// By all members of the crew; ends with a barrier.
void multiply(const Product& job, Crew* crew);

// softmax(scale q k^T) v of one head over one sequence: rows [first, first + rows) of qkv, whose row holds all heads' q,
// then k, then v. `scratch` is the member's own, attend_floats() long.
struct Heads {
  const Element* qkv;
  size_t ld;
  int num_heads;
  int head_dim;
  float scale;
  Left out;
};
void attend(const Heads& job, int first, int rows, int head, float* scratch);
size_t attend_floats(int rows, int head_dim);

// A member's state for products: tiles are configured and given back once per encoding.
void begin_products();
void end_products();

}  // namespace naru
