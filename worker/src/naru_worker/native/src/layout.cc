#include "layout.h"

#include <algorithm>

#include "gemm_tiles.h"
#include "sampler.h"

namespace naru {
namespace {

// Longer steps go through the tape in pieces: activations stay in the L2 cache and their memory is bounded.
constexpr int kChunkTokens = 512;  // at most kMaxTileRows
// Logits of at most this many bytes exist at once.
constexpr size_t kLogitsBytes = size_t{24} << 20;
constexpr int kMaxLogitsRows = 64;

size_t lines(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

// Hands out addresses one after the other.
class Cursor {
 public:
  explicit Cursor(uint8_t* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <typename T>
  T* take(size_t count) {
    const uintptr_t at = base_ + taken_;
    taken_ += lines(count * sizeof(T));
    return reinterpret_cast<T*>(at);
  }

  size_t taken() const { return taken_; }

 private:
  uintptr_t base_;
  size_t taken_ = 0;
};

void place(Buffer* b, size_t rows, Cursor* cursor) {
  Activations& a = b->a;
  const size_t width = static_cast<size_t>(a.width);
  a.f = cursor->take<float>(rows * a.ld);
  if (!b->fed || a.width % kGroup != 0) return;
  a.q = cursor->take<int8_t>(rows * width);
  a.meta = cursor->take<GroupMeta>(rows * (width / kGroup));
  if (kHasTiles && !b->gathered) a.h = cursor->take<bf16>(rows * width);
}

size_t scratch_floats(const ModelSpec& spec, const std::vector<Buffer>& buffers) {
  int widest = 16;
  for (const Buffer& b : buffers) widest = std::max(widest, b.a.width);
  const size_t attention =
      attention_scratch_floats(spec.num_heads / spec.num_kv_heads, round_up(spec.head_dim, 16));
  const size_t row = std::max(static_cast<size_t>(round_up(widest, 16)), tile_scratch_floats(widest));
  const size_t sampler = lines(sampler_scratch_bytes(spec.vocab_size)) / sizeof(float);
  return lines(std::max({attention, row, sampler}) * sizeof(float)) / sizeof(float);
}

}  // namespace

Buffer make_buffer(const BufferSpec& spec) {
  Buffer b;
  b.a.width = spec.width;
  b.a.ld = static_cast<size_t>(round_up(spec.width, 16));
  b.a.wants_f = spec.wants_f != 0;
  b.a.wants_q = spec.wants_q != 0;
  b.gathered = spec.gathered != 0;
  b.fed = spec.fed != 0;
  return b;
}

Layout lay_out(const ModelSpec& spec, std::vector<Buffer>* buffers, uint8_t* base) {
  Layout l;
  l.chunk_tokens = std::min(spec.max_num_tokens, kChunkTokens);
  const size_t row_floats = static_cast<size_t>(round_up(spec.vocab_size, 16));
  const int fit = static_cast<int>(std::max<size_t>(1, kLogitsBytes / (row_floats * sizeof(float))));
  l.chunk_rows = std::min({spec.max_num_tokens, kMaxLogitsRows, std::max(fit, 4)});
  l.scratch_stride = scratch_floats(spec, *buffers);

  // Ranges are items of their own only while there are fewer tokens than this.
  const size_t max_spread = static_cast<size_t>(kSpreadTasks * spec.num_threads / spec.num_kv_heads + 1);
  const size_t max_ranges = static_cast<size_t>(num_ranges(spec.max_model_len));
  const size_t slots = max_spread * max_ranges * static_cast<size_t>(spec.num_kv_heads);
  const size_t group = static_cast<size_t>(spec.num_heads / spec.num_kv_heads);
  const size_t slot_floats = range_rows_floats(static_cast<int>(group), round_up(spec.head_dim, 16));

  Cursor cursor(base);
  for (Buffer& b : *buffers) {
    // Rows of whole tiles: kernels may compute, and never store, rows past the last.
    place(&b, static_cast<size_t>(round_up(b.gathered ? l.chunk_rows : l.chunk_tokens, 32)), &cursor);
  }
  l.logits = cursor.take<float>(static_cast<size_t>(l.chunk_rows) * row_floats);
  l.rope = cursor.take<float>(static_cast<size_t>(l.chunk_tokens) * spec.rotary_dim);
  l.scratch = cursor.take<float>(static_cast<size_t>(spec.num_threads) * l.scratch_stride);
  l.partials = cursor.take<float>(slots * slot_floats);
  l.pending = cursor.take<std::atomic<int>>(slots);
  l.items = cursor.take<AttentionItem>(static_cast<size_t>(l.chunk_tokens) + max_spread * max_ranges);
  l.bytes = cursor.taken();
  return l;
}

}  // namespace naru
