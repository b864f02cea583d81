// Building a model: weights packed or pointed at, buffers placed, tape taken over.
#include "model.h"

#include <unistd.h>

#include <algorithm>

#include "gemm_tiles.h"
#include "rowops.h"
#include "tiles.h"

namespace naru {

Model::Model(const ModelSpec& spec, const double* inverse_frequency, Device* device)
    : spec_(spec),
      inverse_frequency_(inverse_frequency, inverse_frequency + spec.rotary_dim / 2),
      device_(*device),
      pool_(device->pool()) {
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
}

bool Model::reserve() {
  if (spec_.weight_bytes > 0 && !weights_.reserve(static_cast<size_t>(spec_.weight_bytes))) return false;
  const size_t bytes = kv_.block_bytes() * static_cast<size_t>(kv_.num_blocks);
  // Memory is taken as blocks are written; more than the machine has could never be.
  const size_t machine = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (bytes > machine || !kv_arena_.reserve_addresses(bytes)) return false;
  // Long contexts are read up to 6 % faster, and no more is taken than one huge page for each run of blocks in use.
  kv_arena_.prefer_huge(bytes);
  kv_.base = kv_arena_.base();
  return true;
}

int Model::add_vector(const float* values, int n) {
  copied_.emplace_back(values, values + n);
  return add_vector_view(copied_.back().data(), 0);
}

int Model::add_vector_view(const float* values, uint64_t end) {
  vectors_.push_back(Vector{values, end});
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

void pack_job(void* ctx, int member) {
  const PackJob& j = *static_cast<PackJob*>(ctx);
  Pool::Share share = j.pool->share(member, j.panels);
  for (int p = j.pool->claim(&share); p >= 0; p = j.pool->claim(&share)) pack_panels(*j.segment, j.k, j.file, p, p + 1);
}

}  // namespace

Matrix* Model::new_matrix(int k) {
  matrices_.push_back(new Matrix);
  matrices_.back()->k = k;
  return matrices_.back();
}

// One segment a part: parts start on a panel of their own, so that each is packed and addressed alone.
Segment* Model::add_segment(Matrix* w, int format, int rows) {
  Segment& s = w->segments[w->num_segments++];
  s.format = format;
  s.rows = rows;
  s.first_row = w->n;
  s.panels = (rows + kPanel - 1) / kPanel;
  s.first_panel = w->panels;
  s.panel_bytes = panel_bytes(format, w->k);
  w->n += s.rows;
  w->panels += s.panels;
  (is_quantized(format) ? w->wants_quant : w->wants_float) = true;
  return &s;
}

int Model::add_matrix(int k, int num_parts, const int32_t* formats, const int32_t* rows, const uint8_t* const* data,
                      const float* bias) {
  if (num_parts > kMaxSegments) return -2;
  Matrix* w = new_matrix(k);
  for (int i = 0; i < num_parts; ++i) {
    Segment* s = add_segment(w, formats[i], rows[i]);
    s->data = weights_.take(segment_bytes(s->format, s->rows, k));
    if (s->data == nullptr) return -1;
    PackJob job{&pool_, s, k, data[i], 0, s->panels};
    device_.run(pack_job, &job);
  }
  if (bias != nullptr) {
    const size_t padded = static_cast<size_t>(w->n) + 16;
    w->bias = reinterpret_cast<float*>(weights_.take(padded * sizeof(float)));
    if (w->bias == nullptr) return -1;
    memcpy(w->bias, bias, static_cast<size_t>(w->n) * sizeof(float));
  }
  return static_cast<int>(matrices_.size()) - 1;
}

int Model::add_matrix_view(int k, int num_parts, const int32_t* formats, const int32_t* rows, uint8_t* const* data,
                           float* bias, uint64_t end) {
  if (num_parts > kMaxSegments) return -2;
  Matrix* w = new_matrix(k);
  for (int i = 0; i < num_parts; ++i) add_segment(w, formats[i], rows[i])->data = data[i];
  w->bias = bias;
  w->end = end;
  return static_cast<int>(matrices_.size()) - 1;
}

uint64_t Model::needed_by(const Instruction& op) const {
  switch (op.op) {
    case kEmbed:
    case kAddPositions:
    case kLinear:
    case kLinearAdd:
    case kLogits:
      return matrices_[op.weight]->end;
    case kNorm:
    case kRopeKV:
      return std::max(end_of(op.weight), end_of(op.bias));
    default:
      return 0;
  }
}

// Where prompt tokens' gated activation goes when their linear layer computes it too: the activation is the next
// instruction, all it makes are tiles of bf16, and panels of gates meet panels of what they gate, in one format.
const Activations* Model::gated_by(size_t index) const {
  if (!kHasTiles || index + 1 >= tape_.size()) return nullptr;
  const Instruction& op = tape_[index];
  const Instruction& act = tape_[index + 1];
  if (op.op != kLinear || op.tail != 0 || act.op != kAct || act.kind != kSwiglu || act.src != op.dst) return nullptr;
  const Activations& to = buffers_[act.dst].a;
  const Matrix& w = *matrices_[op.weight];
  for (int i = 0; i < w.num_segments; ++i)
    if (!is_quantized(w.segments[i].format) || w.segments[i].format != w.segments[0].format) return nullptr;
  const bool whole = w.panels * kPanel == w.n && w.n == 2 * to.width && to.width % kGroup == 0;
  return whole && to.h != nullptr && to.wants_q && !to.wants_f ? &to : nullptr;
}

bool Model::finish(const BufferSpec* buffers, int num_buffers, const Instruction* tape, int count) {
  for (int i = 0; i < num_buffers; ++i) buffers_.push_back(make_buffer(buffers[i]));
  tape_.assign(tape, tape + count);
  then_.assign(tape_.size(), nullptr);
  const Matrix* next = nullptr;
  // Twice around: after the last layer comes the first one of the next step.
  for (size_t i = 2 * tape_.size(); i-- > 0;) {
    const Instruction& op = tape_[i % tape_.size()];
    then_[i % tape_.size()] = next;
    if (op.op == kLinear || op.op == kLinearAdd || op.op == kLogits) next = matrices_[op.weight];
  }
  for (const Instruction& op : tape_) {
    needed_.push_back(needed_by(op));
    if (needed_.back() > needed_in_all_) needed_in_all_ = needed_.back();
  }
  uint8_t* base = device_.claim(lay_out(spec_, &buffers_, nullptr).bytes);
  if (base == nullptr) return false;
  layout_ = lay_out(spec_, &buffers_, base);
  for (size_t i = 0; i < tape_.size(); ++i) gated_.push_back(gated_by(i));
  return true;
}

}  // namespace naru
