// Building a model: weights packed, buffers placed, tape taken over.
#include "model.h"

#include <algorithm>
#include <new>

#include "gemm_tiles.h"
#include "tiles.h"

namespace naru {
namespace {

// Longer steps go through the tape in pieces: activations stay in the L2 cache and their memory is bounded.
constexpr int kChunkTokens = 512;  // at most kMaxTileRows
// Logits of at most this many bytes exist at once.
constexpr size_t kLogitsBytes = size_t{24} << 20;
constexpr int kMaxLogitsRows = 64;

}  // namespace

Model::Model(const ModelSpec& spec, const double* inverse_frequency)
    : spec_(spec),
      inverse_frequency_(inverse_frequency, inverse_frequency + spec.rotary_dim / 2),
      pool_(spec.num_threads) {
  kv_.num_layers = spec.num_layers;
  kv_.num_heads = spec.num_kv_heads;
  kv_.head_dim = spec.head_dim;
  kv_.padded_dim = round_up(spec.head_dim, 16);
  kv_.block_size = spec.block_size;
  kv_.num_blocks = spec.num_blocks;
  kv_.element_bytes = spec.kv_element_bytes;
  tiles_allow();
}

Model::~Model() {
  for (Matrix* m : matrices_) delete m;
  delete[] plan_.items;
}

bool Model::reserve() {
  if (!weights_.reserve(static_cast<size_t>(spec_.weight_bytes))) return false;
  if (!kv_arena_.reserve(kv_.block_bytes() * static_cast<size_t>(kv_.num_blocks))) return false;
  kv_.base = kv_arena_.take(kv_arena_.size());
  return true;
}

int Model::add_vector(const float* values, int n) {
  // Padded, since kernels read whole registers.
  vectors_.emplace_back(values, values + n);
  vectors_.back().resize(static_cast<size_t>(n) + 16, 0.f);
  return static_cast<int>(vectors_.size()) - 1;
}

namespace {

struct PackJob {
  Pool* pool;
  const Segment* segment;
  int k;
  const uint8_t* file;  // of the first row of the run
  int first_panel;
  int panels;
};

void pack_job(void* ctx, int) {
  const PackJob& j = *static_cast<PackJob*>(ctx);
  for (int p = j.pool->next(); p < j.panels; p = j.pool->next()) pack_panels(*j.segment, j.k, j.file, p, p + 1);
}

}  // namespace

int Model::add_matrix(int k, int num_parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data,
                      const float* bias) {
  Matrix* w = new Matrix;
  matrices_.push_back(w);
  w->k = k;
  if (num_parts > kMaxSegments) return -2;
  for (int i = 0; i < num_parts; ++i) {
    // One segment a part: parts start on a panel of their own, so that each is packed and addressed alone.
    Segment& s = w->segments[w->num_segments++];
    s.format = formats[i];
    s.rows = rows[i];
    s.first_row = w->n;
    s.panels = (rows[i] + kPanel - 1) / kPanel;
    s.first_panel = w->panels;
    s.panel_bytes = panel_bytes(s.format, k);
    s.data = weights_.take(segment_bytes(s.format, s.rows, k));
    if (s.data == nullptr) return -1;
    w->n += s.rows;
    w->panels += s.panels;
    (is_quantized(s.format) ? w->wants_quant : w->wants_float) = true;
    PackJob job{&pool_, &s, k, data[i], 0, s.panels};
    pool_.run(pack_job, &job);
  }
  if (bias != nullptr) {
    const size_t padded = static_cast<size_t>(w->n) + 16;
    w->bias = reinterpret_cast<float*>(weights_.take(padded * sizeof(float)));
    if (w->bias == nullptr) return -1;
    memcpy(w->bias, bias, static_cast<size_t>(w->n) * sizeof(float));
  }
  return static_cast<int>(matrices_.size()) - 1;
}

int Model::add_buffer(int width, bool wants_f, bool wants_q, bool gathered) {
  Buffer b{};
  b.a.width = width;
  b.a.ld = static_cast<size_t>(round_up(width, 16));
  b.a.wants_f = wants_f;
  b.a.wants_q = wants_q;
  b.gathered = gathered;
  buffers_.push_back(b);
  return static_cast<int>(buffers_.size()) - 1;
}

bool Model::finish(const Instruction* tape, int count) {
  tape_.assign(tape, tape + count);
  then_.assign(tape_.size(), nullptr);
  const Matrix* next = nullptr;
  // Twice around: after the last layer comes the first one of the next step.
  for (size_t i = 2 * tape_.size(); i-- > 0;) {
    const Instruction& op = tape_[i % tape_.size()];
    then_[i % tape_.size()] = next;
    if (op.op == kLinear || op.op == kLinearAdd || op.op == kLogits) next = matrices_[op.weight];
  }
  chunk_tokens_ = std::min(spec_.max_num_tokens, kChunkTokens);
  const size_t row_bytes = static_cast<size_t>(round_up(spec_.vocab_size, 16)) * sizeof(float);
  const int fit = static_cast<int>(std::max<size_t>(1, kLogitsBytes / row_bytes));
  chunk_rows_ = std::min({spec_.max_num_tokens, kMaxLogitsRows, std::max(fit, 4)});

  const int group = spec_.num_heads / spec_.num_kv_heads;
  const int threads = pool_.size();
  int widest = 16;
  for (const Buffer& b : buffers_) widest = std::max(widest, b.a.width);
  sampler_stride_ = (sampler_scratch_bytes(spec_.vocab_size) + 63) & ~size_t{63};
  scratch_stride_ = std::max(attention_scratch_floats(group, kv_.padded_dim), static_cast<size_t>(round_up(widest, 16)));
  scratch_stride_ = std::max(scratch_stride_, tile_scratch_floats(widest));
  scratch_stride_ = std::max((scratch_stride_ + 15) & ~size_t{15}, sampler_stride_ / sizeof(float));
  // Ranges are items of their own only while there are fewer tokens than this.
  const int max_spread = kSpreadTasks * threads / spec_.num_kv_heads + 1;
  const int max_ranges = num_ranges(spec_.max_model_len);
  const int max_items = chunk_tokens_ + max_spread * max_ranges;
  const size_t slots = static_cast<size_t>(max_spread) * max_ranges * static_cast<size_t>(spec_.num_kv_heads);

  // Twice the same walk: first to count, then to place.
  for (int pass = 0; pass < 2; ++pass) {
    size_t total = 0;
    uint8_t* base = activations_.base();
    auto place = [&](size_t bytes) {
      uint8_t* p = pass == 0 ? nullptr : base + total;
      total += (bytes + 63) & ~size_t{63};
      return p;
    };
    for (Buffer& b : buffers_) {
      // Rows of whole tiles: kernels may compute, and never store, rows past the last.
      const size_t rows = static_cast<size_t>(round_up(b.gathered ? chunk_rows_ : chunk_tokens_, 32));
      Activations& a = b.a;
      if (a.wants_f) a.f = reinterpret_cast<float*>(place(rows * a.ld * sizeof(float)));
      if (a.wants_q) {
        a.q = reinterpret_cast<int8_t*>(place(rows * a.width));
        a.meta = reinterpret_cast<GroupMeta*>(place(rows * (a.width / kGroup) * sizeof(GroupMeta)));
        if (kHasTiles && !b.gathered) a.h = reinterpret_cast<bf16*>(place(rows * a.width * sizeof(bf16)));
      }
    }
    logits_ = reinterpret_cast<float*>(place(static_cast<size_t>(chunk_rows_) * row_bytes));
    rope_ = reinterpret_cast<float*>(place(static_cast<size_t>(chunk_tokens_) * spec_.rotary_dim * sizeof(float)));
    scratch_ = reinterpret_cast<float*>(place(threads * scratch_stride_ * sizeof(float)));
    partials_ = reinterpret_cast<float*>(place(slots * group * (kv_.padded_dim + 2) * sizeof(float)));
    pending_ = reinterpret_cast<std::atomic<int>*>(place(slots * sizeof(std::atomic<int>)));
    if (pass == 0 && !activations_.reserve(total)) return false;
  }
  plan_.items = new (std::nothrow) AttentionItem[max_items];
  return plan_.items != nullptr;
}

}  // namespace naru
