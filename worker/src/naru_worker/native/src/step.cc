// A step: the tape replayed by all members together.
#include <algorithm>

#include "attention_prompt.h"
#include "gemm.h"
#include "gemm_tiles.h"
#include "model.h"
#include "rope.h"
#include "rowops.h"

namespace naru {
namespace {

constexpr int kRowsOfPiece = 8;  // of a long chunk's row operations

}  // namespace

Readiness::State Model::step(const StepInputs& in, const SamplingInputs* sampling, const SamplingOutputs* out,
                             float* logits, int64_t max_wait_ns) {
  in_ = in;
  sampling_ = sampling;
  out_ = out;
  logits_out_ = logits;
  present_ = readiness_.bytes();
  state_.store(Readiness::kReady, std::memory_order_relaxed);
  if (present_ < needed_in_all_) deadline_ns_ = monotonic_ns() + max_wait_ns;
  device_.run(&Model::job, this);
  return state_.load(std::memory_order_relaxed);
}

void Model::job(void* self, int member) { static_cast<Model*>(self)->run(member); }

// Inside a job, by all members: waits until the first `needed` bytes of the image are present. False: they are not, and
// the step ends here, or has ended for others at a later place.
bool Model::await_weights(int member, uint64_t needed) {
  // As it was when the step began, so that all members go through the same sections.
  if (needed <= present_) return true;
  Pool::Share share = pool_.share(member, 1);
  if (pool_.claim(&share) >= 0) {
    const Readiness::State state = readiness_.await(needed, deadline_ns_);
    if (state != Readiness::kReady) state_.store(state, std::memory_order_release);
  }
  pool_.barrier(member);
  return state_.load(std::memory_order_acquire) == Readiness::kReady;
}

void Model::run(int member) {
  // A step that may have to be run again copies nothing: blocks that pass on what they got cannot be copied twice.
  if (in_.num_copies > 0 && !await_weights(member, needed_in_all_)) return;
  copy_blocks(member);
  // Rows of logits are gathered while chunks pass. When more are asked for than fit, chunks pass no more rows than that.
  int row = 0;
  int pending_rows = 0;
  for (int first = 0; first < in_.num_tokens;) {
    int count = std::min(layout_.chunk_tokens, in_.num_tokens - first);
    int end_row = row;
    while (end_row < in_.num_rows && in_.logits_rows[end_row] < first + count) ++end_row;
    if (!run_chunk(member, first, count)) return;
    for (; row < end_row;) {
      const int rows = std::min(layout_.chunk_rows - pending_rows, end_row - row);
      gather(member, row, rows, pending_rows, first);
      row += rows;
      pending_rows += rows;
      if (pending_rows == layout_.chunk_rows) {
        if (!run_rows(member, row - pending_rows, pending_rows)) return;
        pending_rows = 0;
      }
    }
    first += count;
  }
  if (pending_rows > 0) run_rows(member, row - pending_rows, pending_rows);
}

// Copies rows [row, row + count) of the logits rows, out of the chunk that starts at token `first`, to place `at`.
void Model::gather(int member, int row, int count, int at, int first) {
  Pool::Share share = pool_.share(member, count);
  for (int i = pool_.claim(&share); i >= 0; i = pool_.claim(&share)) {
    for (const Instruction& op : tape_) {
      if (op.op != kGather) continue;
      const Activations& x = buffers_[op.src].a;
      const Activations& to = buffers_[op.dst].a;
      emit_row(to, at + i, x.f + static_cast<size_t>(in_.logits_rows[row + i] - first) * x.ld, kNoTileRow);
    }
  }
  pool_.barrier(member);
}

bool Model::run_chunk(int member, int first, int count) {
  prepare_chunk(member, first, count);
  for (size_t i = 0; i < tape_.size(); ++i) {
    if (tape_[i].tail || tape_[i].op == kGather) continue;
    if (!await_weights(member, needed_[i])) return false;
    execute(i, member, first, count);
    pool_.barrier(member);
  }
  return true;
}

// The rest of the last layer, final norm, logits and sampling of gathered rows [first, first + count).
bool Model::run_rows(int member, int first, int count) {
  for (size_t i = 0; i < tape_.size(); ++i) {
    if (!tape_[i].tail) continue;
    if (!await_weights(member, needed_[i])) return false;
    execute(i, member, first, count);
    pool_.barrier(member);
  }
  const size_t ld = static_cast<size_t>(round_up(spec_.vocab_size, 16));
  const Activations& normed = buffers_[tape_.back().src].a;
  uint8_t* scratch = reinterpret_cast<uint8_t*>(member_scratch(member));
  Pool::Share share = pool_.queue(member, count);
  for (int i = pool_.claim(&share); i >= 0; i = pool_.claim(&share)) {
    const float* x = layout_.logits + static_cast<size_t>(i) * ld;
    if (logits_out_ != nullptr)
      memcpy(logits_out_ + static_cast<size_t>(first + i) * spec_.vocab_size, x, spec_.vocab_size * sizeof(float));
    if (out_ != nullptr && out_->hidden != nullptr)
      memcpy(out_->hidden + static_cast<size_t>(first + i) * normed.width,
             normed.f + static_cast<size_t>(i) * normed.ld, normed.width * sizeof(float));
    if (sampling_ != nullptr) sample_row(*sampling_, *out_, first + i, x, spec_.vocab_size, scratch);
  }
  pool_.barrier(member);
  return true;
}

// out = x W^T for rows of both kinds: generated ones by bytes, prompts by tiles of bf16.
void Model::run_linear(const Linear& job, int generated, int member) {
  if (generated > 0) {
    Linear part = job;
    part.rows = generated;
    linear(part, &pool_, member);
  }
  if (generated == job.rows) return;
  if (generated > 0) pool_.barrier(member);
  Linear part = job;
  Activations rest = *job.x;
  if (rest.f != nullptr) rest.f += static_cast<size_t>(generated) * rest.ld;
  part.x = &rest;
  part.rows = job.rows - generated;
  part.out += static_cast<size_t>(generated) * job.ld;
  part.tiles = true;
  linear(part, &pool_, member);
}

void Model::execute(size_t index, int member, int first, int rows) {
  const Instruction& op = tape_[index];
  const bool has_dst = op.op != kRopeKV && op.op != kLogits;
  const Activations* dst = has_dst ? &buffers_[op.dst].a : nullptr;
  const Activations* src = op.op == kEmbed ? nullptr : &buffers_[op.src].a;
  float* scratch = member_scratch(member);
  // Rows [generated, rows) take the way of prompts, where there is one. Rows of logits all go one way.
  const int generated =
      kHasTiles && op.tail == 0 ? std::max(0, std::min(rows, in_.num_generated_tokens - first)) : rows;
  // A piece is one row, or a few where there are many: claiming one costs about as much as rotating a short row.
  const auto each_row = [this, member](int count, auto row) {
    const int step = count < 8 * kRowsOfPiece * pool_.size() ? 1 : kRowsOfPiece;
    Pool::Share share = pool_.share(member, (count + step - 1) / step);
    for (int i = pool_.claim(&share); i >= 0; i = pool_.claim(&share))
      for (int r = i * step; r < std::min(count, (i + 1) * step); ++r) row(r);
  };
  const auto tile_row = [generated](int r) { return r < generated ? kNoTileRow : r - generated; };
  switch (op.op) {
    case kEmbed:
      each_row(rows, [&](int r) {
        matrix_row(*matrices_[op.weight], in_.token_ids[first + r], dst->f + static_cast<size_t>(r) * dst->ld);
      });
      break;
    case kAddPositions:
      each_row(rows, [&](int r) {
        matrix_row(*matrices_[op.weight], in_.positions[first + r], scratch);
        float* x = dst->f + static_cast<size_t>(r) * dst->ld;
        for (int c = 0; c < dst->width; ++c) x[c] += scratch[c];
      });
      break;
    case kNorm:
      each_row(rows, [&](int r) {
        float* to = dst->wants_f ? dst->f + static_cast<size_t>(r) * dst->ld : scratch;
        norm_row(src->f + static_cast<size_t>(r) * src->ld, src->width, values_of(op.weight), values_of(op.bias),
                 op.value, op.kind, to);
        emit_row(*dst, r, to, tile_row(r));
      });
      break;
    case kAct:
      // Where the linear layer before it did prompt tokens' rows, the others are left.
      each_row(index > 0 && gated_[index - 1] != nullptr ? generated : rows, [&](int r) {
        float* to = dst->wants_f ? dst->f + static_cast<size_t>(r) * dst->ld : scratch;
        act_row(src->f + static_cast<size_t>(r) * src->ld, dst->width, op.kind, to);
        emit_row(*dst, r, to, tile_row(r));
      });
      break;
    case kLinear:
    case kLinearAdd:
      run_linear(Linear{matrices_[op.weight], src, rows, dst->f, dst->ld, op.op == kLinearAdd, false, then_[index],
                        scratch, gated_[index]},
                 matrices_[op.weight]->wants_quant ? generated : rows, member);
      break;
    case kLogits:
      linear(Linear{matrices_[op.weight], src, rows, layout_.logits, static_cast<size_t>(round_up(spec_.vocab_size, 16)),
                    false, false, then_[index], scratch},
             &pool_, member);
      break;
    case kRopeKV: {
      const HeadNorms norms{values_of(op.weight), values_of(op.bias), op.value};
      each_row(rows, [&](int r) {
        rope_kv_row(src->f + static_cast<size_t>(r) * src->ld, op.kind, norms,
                    spec_.rotary_dim > 0 ? layout_.rope + static_cast<size_t>(r) * spec_.rotary_dim : nullptr,
                    spec_.rotary_dim, kv_, op.layer, in_.slots[first + r], scratch);
      });
      break;
    }
    case kAttention: {
      const bool whole_groups = dst->wants_q && spec_.head_dim % kGroup == 0;
      const Attention job{src->f, src->ld, spec_.num_heads, &kv_, op.layer, op.value, op.window, dst->f, dst->ld,
                          layout_.partials, layout_.pending, whole_groups ? dst : nullptr, generated};
      attention(job, AttentionPlan{layout_.items, num_items_.load(std::memory_order_acquire)}, &pool_, member, scratch);
      if (!dst->wants_q || whole_groups) break;
      pool_.barrier(member);
      each_row(rows, [&](int r) { emit_row(*dst, r, dst->f + static_cast<size_t>(r) * dst->ld, tile_row(r)); });
      break;
    }
    default:
      break;
  }
}

// What all layers of a chunk use: piece 0 plans attention, the others are rows of angles.
void Model::prepare_chunk(int member, int first, int count) {
  Pool::Share share = pool_.queue(member, spec_.rotary_dim == 0 ? 1 : 1 + count);
  for (int i = pool_.claim(&share); i >= 0; i = pool_.claim(&share)) {
    if (i == 0)
      plan_attention(first, count);
    else
      rope_table_row(in_.positions[first + i - 1], inverse_frequency_.data(), spec_.rotary_dim / 2, spec_.rope_factor,
                     layout_.rope + static_cast<size_t>(i - 1) * spec_.rotary_dim);
  }
  pool_.barrier(member);
}

void Model::copy_blocks(int member) {
  if (in_.num_copies == 0) return;
  const size_t bytes = kv_.block_bytes();
  // In order, so one piece: a block may be source of one copy and destination of the next.
  Pool::Share share = pool_.share(member, 1);
  if (pool_.claim(&share) >= 0)
    for (int i = 0; i < in_.num_copies; ++i)
      memmove(kv_.base + static_cast<size_t>(in_.copies[2 * i + 1]) * bytes,
              kv_.base + static_cast<size_t>(in_.copies[2 * i]) * bytes, bytes);
  pool_.barrier(member);
}

// Cuts the chunk's tokens [first, first + count) into items: prompts into tiles of tokens, generated ones each alone, and
// when few sequences run, those into their KV ranges.
void Model::plan_attention(int first, int count) {
  const int prompts = std::max(0, first + count - std::max(first, in_.num_generated_tokens));
  int left = prompts;
  const int* starts = in_.query_start;
  int seq = 0;
  while (starts[seq + 1] <= first) ++seq;
  const bool spread = count * spec_.num_kv_heads < kSpreadTasks * pool_.size();

  int num_items = 0;
  int partial = 0;
  for (int s = seq; s < in_.num_seqs && starts[s] < first + count; ++s) {
    const int begin = std::max(starts[s], first), end = std::min(starts[s + 1], first + count);
    const int base = in_.seq_lens[s] - (starts[s + 1] - starts[s]);  // position of the sequence's first new token
    const int32_t* blocks = in_.block_table + static_cast<size_t>(s) * in_.max_blocks;
    if (begin < in_.num_generated_tokens) {
      for (int t = begin; t < end; ++t) {
        const int position = base + t - starts[s];
        const int splits = spread ? num_ranges(position) : 1;
        for (int i = 0; i < splits; ++i)
          layout_.items[num_items++] = AttentionItem{t - first, 1, position, blocks, true, i, splits, partial};
        if (splits > 1) partial += splits * spec_.num_kv_heads;
      }
      continue;
    }
    // Late tiles see more tokens and take longest: first, so that the members end together.
    for (int t = end; t > begin;) {
      const int tile = std::min(t - begin, prompt_item_tokens(left, spec_.num_heads, spec_.num_kv_heads, kv_.padded_dim,
                                                              pool_.size()));
      t -= tile;
      left -= tile;
      layout_.items[num_items++] = AttentionItem{t - first, tile, base + t - starts[s], blocks, false, 0, 1, 0};
    }
  }
  num_items_.store(num_items, std::memory_order_release);
  // Whatever another model left there.
  for (int i = 0; i < partial; ++i) layout_.pending[i].store(0, std::memory_order_relaxed);
}

}  // namespace naru
