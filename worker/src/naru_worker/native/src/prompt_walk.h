// The way of a prompt item through its tokens, for any kernel.
//
// The cache is unpacked a stage at a time to what the kernel multiplies: once for all rows of the item, so that its format
// costs little and kernels do not know it. Within a stage, tiles of rows whose sums fit the first cache pass over the
// stage's spans. A kernel is at three units at once, so that products and exponentials can overlap: it mixes the values of
// the unit before by their weights, makes weights of this one's scores, and scores the next.
//
// A kernel has: rows (PromptRows), stage_spans(), load_queries(), unpack_keys(), unpack_values(), clear_values(), advance().
#pragma once

#include <algorithm>

#include "kv_read.h"
#include "prompt_rows.h"

namespace naru {

constexpr int kTileBlocks = 6;

// One block of rows over one span.
struct PromptUnit {
  int block = -1;   // none
  int index = 0;    // of the span in its stage
  int span = 0;
  int columns = 0;  // of sixteen tokens, of which some row sees one
  int slot = 0;     // which of two buffers holds its scores
};

template <typename T, class Kernel>
void unpack_span(Kernel* kernel, const Attention& job, const AttentionItem& item, int head, int index, int span, int from,
                 int to) {
  const KVCache& kv = *job.kv;
  const int size = kv.block_size;
  for (int c = 0; c < kSpan; c += 16) {
    const int token = span + c;
    if (token >= to) {
      // Products of values take 32 tokens at a time.
      if (c % 32 != 0) kernel->clear_values(index, c);
      break;
    }
    const KVPlace at{job.layer, head, item.blocks[token / size], token % size};
    if (token % size == 0 && token + 2 * size < to)
      fetch_kv(kv, KVPlace{job.layer, head, item.blocks[token / size + 2], 0});
    kernel->unpack_keys(KeyReader<T>(kv, at), index, c);
    // Slots outside hold nothing: 0 times NaN is NaN.
    kernel->unpack_values(ValueReader<T>(kv, at), index, c, from > token ? from - token : 0, std::min(16, to - token));
  }
}

template <class Kernel>
void attend_tile(Kernel* kernel, int first_block, int end_block, int stage, int from, int to) {
  const PromptRows& t = kernel->rows;
  const int hi = std::min(to, t.end_token(end_block - 1));
  PromptUnit before, now;
  int slot = 0;
  for (int span = std::max(stage, std::max(from, t.first_token(first_block)) / kSpan * kSpan); span < hi; span += kSpan) {
    for (int b = first_block; b < end_block; ++b) {
      const int visible = t.end_token(b) - span;
      if (visible <= 0 || t.first_token(b) >= span + kSpan) continue;
      const int columns = std::min(kSpan, round_up(visible, 16)) / 16;
      const PromptUnit next{b, (span - stage) / kSpan, span, columns, slot ^= 1};
      kernel->advance(before, now, next);
      before = now;
      now = next;
    }
  }
  kernel->advance(before, now, PromptUnit{});
  kernel->advance(now, PromptUnit{}, PromptUnit{});
}

template <typename T, class Kernel>
void walk_prompt(Kernel* kernel, const Attention& job, const AttentionItem& item, int head) {
  PromptRows& t = kernel->rows;
  t.start(job, item);
  kernel->load_queries(job, item, head);
  const int from = t.begin[0], to = t.end[t.rows - 1];
  const int length = kernel->stage_spans() * kSpan;
  for (int stage = from / kSpan * kSpan; stage < to; stage += length) {
    for (int span = stage; span < std::min(stage + length, to); span += kSpan)
      unpack_span<T>(kernel, job, item, head, (span - stage) / kSpan, span, from, to);
    for (int b = 0; b < t.blocks; b += kTileBlocks)
      attend_tile(kernel, b, std::min(b + kTileBlocks, t.blocks), stage, from, std::min(stage + length, to));
  }
  t.put(job, item, head);
}

}  // namespace naru
