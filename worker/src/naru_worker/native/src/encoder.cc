#include "encoder.h"

#include <algorithm>
#include <cmath>

#include "tiles.h"

namespace naru {
namespace {

// Whole sequences are put together up to so many rows: enough for weights to be read seldom, few enough for the L2 cache.
constexpr int kChunkRows = 128;
// With fewer rows for each thread, reading all weights costs it more than sharing each layer with the others.
constexpr int kAloneRows = 64;

size_t lines(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

template <typename T>
T* take(Arena* arena, size_t count) {
  return reinterpret_cast<T*>(arena->take(count * sizeof(T)));
}

int chunk_rows(const EncoderSpec& s) { return round_up(std::max(kChunkRows, s.max_len), kLeftRows); }

size_t bias_floats(int n) { return static_cast<size_t>(n) + kStep; }

float dot(const float* a, const float* b, int n) {
  V16 sum = set16(0.f);
  int c = 0;
  for (; c + kPanel <= n; c += kPanel) sum = fma16(load16(a + c), load16(b + c), sum);
  if (c < n) sum = fma16(load16n(a + c, n - c), load16n(b + c, n - c), sum);
  return hsum16(sum);
}

// Adds up what each weight takes; the same walk as `reserve`.
struct Sizes {
  size_t bytes = 0;
  void elements(size_t n) { bytes += lines(n * sizeof(Element)); }
  void floats(size_t n) { bytes += lines(n * sizeof(float)); }
  void weight(int n, int k) {
    elements(weight_elements(n, k));
    floats(bias_floats(n));
  }
};

}  // namespace

size_t Encoder::weight_bytes(const EncoderSpec& s) {
  Sizes sizes;
  for (int rows : {s.vocab_size, s.num_positions, s.num_types})
    sizes.elements(static_cast<size_t>(rows) * static_cast<size_t>(s.hidden));
  const size_t hidden = static_cast<size_t>(s.hidden);
  for (int i = 0; i < 2 + 4 * s.num_layers; ++i) sizes.floats(hidden);
  for (int i = 0; i < s.num_layers; ++i) {
    sizes.weight(3 * s.hidden, s.hidden);
    sizes.weight(s.hidden, s.hidden);
    sizes.weight(s.inner, s.hidden);
    sizes.weight(s.hidden, s.inner);
  }
  if (s.num_labels > 0) {
    sizes.floats(hidden * hidden);
    sizes.floats(hidden);
    sizes.floats(hidden * static_cast<size_t>(s.num_labels));
    sizes.floats(static_cast<size_t>(s.num_labels));
  }
  return sizes.bytes;
}

bool Encoder::reserve() {
  tiles_allow();
  if (!arena_.reserve(weight_bytes(spec_))) return false;
  const EncoderSpec& s = spec_;
  const size_t hidden = static_cast<size_t>(s.hidden);
  const auto table = [&](int rows) {
    return Table{take<Element>(&arena_, static_cast<size_t>(rows) * hidden), rows, s.hidden};
  };
  const auto norm = [&] {
    Norm n;
    n.weight = take<float>(&arena_, hidden);
    n.bias = take<float>(&arena_, hidden);
    return n;
  };
  const auto weight = [&](int n, int k) {
    Weight w;
    w.n = n;
    w.k = k;
    w.data = take<Element>(&arena_, weight_elements(n, k));
    w.bias = take<float>(&arena_, bias_floats(n));
    return w;
  };
  words_ = table(s.vocab_size);
  positions_ = table(s.num_positions);
  types_ = table(s.num_types);
  embed_norm_ = norm();
  for (int i = 0; i < s.num_layers; ++i) {
    Layer l;
    l.qkv = weight(3 * s.hidden, s.hidden);
    l.out = weight(s.hidden, s.hidden);
    l.up = weight(s.inner, s.hidden);
    l.down = weight(s.hidden, s.inner);
    l.attn = norm();
    l.mlp = norm();
    layers_.push_back(l);
  }
  if (s.num_labels > 0) {
    head_dense_ = take<float>(&arena_, hidden * hidden);
    head_dense_bias_ = take<float>(&arena_, hidden);
    head_out_ = take<float>(&arena_, hidden * static_cast<size_t>(s.num_labels));
    head_out_bias_ = take<float>(&arena_, static_cast<size_t>(s.num_labels));
  }
  uint8_t* base = device_.claim(workspace_bytes(s));
  if (base == nullptr) return false;
  lay_out(s, base, &works_, &scratch_);
  return true;
}

bool Encoder::put(int tensor, const float* values) {
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  const auto copy = [&](float* to, size_t n) {
    if (to == nullptr) return false;
    memcpy(to, values, n * sizeof(float));
    return true;
  };
  switch (tensor) {
    case kWords:
      return pack_table(words_, values), true;
    case kPositions:
      return pack_table(positions_, values), true;
    case kTypes:
      return pack_table(types_, values), true;
    case kEmbedNorm:
      return copy(embed_norm_.weight, hidden);
    case kEmbedNormBias:
      return copy(embed_norm_.bias, hidden);
    case kHeadDense:
      return copy(head_dense_, hidden * hidden);
    case kHeadDenseBias:
      return copy(head_dense_bias_, hidden);
    case kHeadOut:
      return copy(head_out_, hidden * static_cast<size_t>(spec_.num_labels));
    case kHeadOutBias:
      return copy(head_out_bias_, static_cast<size_t>(spec_.num_labels));
    default:
      break;
  }
  const int index = tensor - kFirstLayer;
  if (index < 0 || index / kLayerTensors >= spec_.num_layers) return false;
  const Layer& l = layers_[static_cast<size_t>(index / kLayerTensors)];
  const Weight* weights[] = {&l.qkv, &l.out, &l.up, &l.down};
  const int part = index % kLayerTensors;
  switch (part) {
    case kAttnNorm:
      return copy(l.attn.weight, hidden);
    case kAttnNormBias:
      return copy(l.attn.bias, hidden);
    case kMlpNorm:
      return copy(l.mlp.weight, hidden);
    case kMlpNormBias:
      return copy(l.mlp.bias, hidden);
    default: {
      const Weight& w = *weights[part < kAttnNorm ? part / 2 : 2 + (part - kUp) / 2];
      if (part % 2 == 1) return copy(w.bias, static_cast<size_t>(w.n));
      pack_weight(w, values);
      return true;
    }
  }
}

size_t Encoder::lay_out(const EncoderSpec& s, uint8_t* base, std::vector<Work>* works, std::vector<float*>* scratch) {
  size_t taken = 0;
  const auto at = [&](size_t bytes) {
    const uintptr_t here = reinterpret_cast<uintptr_t>(base) + taken;
    taken += lines(bytes);
    return here;
  };
  const int rows = chunk_rows(s);
  const auto count = [&](int width) { return static_cast<size_t>(rows) * static_cast<size_t>(padded(width)); };
  const auto left = [&](int width) {
    return Left{reinterpret_cast<Element*>(at(left_elements(rows, width) * sizeof(Element))), width};
  };
  for (int i = 0; i < s.num_threads; ++i) {
    Work w;
    w.x = reinterpret_cast<float*>(at(count(s.hidden) * sizeof(float)));
    w.y = reinterpret_cast<float*>(at(count(s.hidden) * sizeof(float)));
    w.qkv = reinterpret_cast<Element*>(at(count(3 * s.hidden) * sizeof(Element)));
    w.xl = left(s.hidden);
    w.al = left(s.hidden);
    w.hl = left(s.inner);
    const size_t floats = std::max(attend_floats(s.max_len, s.head_dim), static_cast<size_t>(2 * padded(s.hidden)));
    float* own = reinterpret_cast<float*>(at(floats * sizeof(float)));
    if (works != nullptr) works->push_back(w);
    if (scratch != nullptr) scratch->push_back(own);
  }
  return taken;
}

size_t Encoder::workspace_bytes(const EncoderSpec& spec) { return lay_out(spec, nullptr, nullptr, nullptr); }

int Encoder::validate(const EncoderInputs& in) const {
  if (in.num_seqs < 1 || in.starts == nullptr || in.token_ids == nullptr || in.starts[0] != 0) return -1;
  for (int s = 0; s < in.num_seqs; ++s) {
    const int length = in.starts[s + 1] - in.starts[s];
    if (length < 1) return -2;
    if (length > spec_.max_len || spec_.first_position + length > spec_.num_positions) return -3;
  }
  for (int t = 0; t < in.starts[in.num_seqs]; ++t) {
    if (in.token_ids[t] < 0 || in.token_ids[t] >= spec_.vocab_size) return -4;
    if (in.token_types == nullptr || in.token_types[t] == 0) continue;
    if (in.token_types[t] < 0 || in.token_types[t] >= spec_.num_types) return -5;
  }
  return 0;
}

void Encoder::encode(const EncoderInputs& in, float* out) {
  in_ = in;
  out_ = out;
  plan();
  device_.run(&Encoder::job, this);
}

// Cuts the batch into chunks. Their size decides on speed alone.
void Encoder::plan() {
  const int total = in_.starts[in_.num_seqs], threads = pool_.size();
  each_alone_ = threads > 1 && in_.num_seqs >= threads && total >= threads * kAloneRows;
  int limit = kChunkRows;
  if (each_alone_) {
    // As many chunks as threads, or a multiple, all about as large.
    const int rounds = (total + threads * kChunkRows - 1) / (threads * kChunkRows);
    limit = (total + threads * rounds - 1) / (threads * rounds);
  }
  chunks_.clear();
  for (int seq = 0; seq < in_.num_seqs;) {
    const int first = in_.starts[seq];
    int end = seq + 1;
    while (end < in_.num_seqs && in_.starts[end + 1] - first <= kChunkRows) {
      // The sequence that crosses the limit goes where its middle lies.
      if ((in_.starts[end] + in_.starts[end + 1]) / 2 - first > limit) break;
      ++end;
    }
    chunks_.push_back(Chunk{seq, end, first, in_.starts[end] - first});
    seq = end;
  }
}

void Encoder::job(void* self, int member) { static_cast<Encoder*>(self)->run(member); }

void Encoder::run(int member) {
  begin_products();
  float* scratch = scratch_[static_cast<size_t>(member)];
  if (each_alone_) {
    Pool::Share share = pool_.queue(member, static_cast<int>(chunks_.size()));
    for (int i = pool_.claim(&share); i >= 0; i = pool_.claim(&share)) {
      Pass pass{chunks_[static_cast<size_t>(i)], Crew{nullptr, 0, 1}, works_[static_cast<size_t>(member)], scratch};
      run_chunk(&pass);
    }
  } else {
    for (const Chunk& chunk : chunks_) {
      Pass pass{chunk, Crew{&pool_, member, pool_.size()}, works_[0], scratch};
      run_chunk(&pass);
    }
  }
  end_products();
}

void Encoder::run_chunk(Pass* pass) {
  embed(pass);
  for (size_t i = 0; i < layers_.size(); ++i) layer(layers_[i], layers_[(i + 1) % layers_.size()], pass);
  pool_rows(pass);
}

void Encoder::add_table_row(const Table& table, int row, float* x) const {
  const Element* from = table.data + static_cast<size_t>(row) * static_cast<size_t>(table.width);
  int c = 0;
  for (; c + kPanel <= table.width; c += kPanel) store16(x + c, load16(x + c) + load16(from + c));
  for (; c < table.width; ++c) x[c] += to_float(from[c]);
}

void Encoder::embed(Pass* pass) {
  const Chunk& chunk = pass->chunk;
  const size_t ld = static_cast<size_t>(padded(spec_.hidden));
  Crew* crew = &pass->crew;
  int seq = chunk.first_seq;
  crew->begin(chunk.rows);
  for (int r = crew->next(); r >= 0; r = crew->next()) {
    if (r == 0) {
      clear_padding(pass->work.al, chunk.rows);
      clear_padding(pass->work.hl, chunk.rows);
    }
    const int t = chunk.first + r;
    while (in_.starts[seq + 1] <= t) ++seq;
    float* y = pass->work.y + static_cast<size_t>(r) * ld;
    memset(y, 0, ld * sizeof(float));
    add_table_row(words_, in_.token_ids[t], y);
    if (spec_.num_types > 0) add_table_row(types_, in_.token_types == nullptr ? 0 : in_.token_types[t], y);
    add_table_row(positions_, spec_.first_position + t - in_.starts[seq], y);
  }
  crew->barrier();
  norm_rows(embed_norm_, pass);
}

// By all members of the crew; ends with a barrier.
void Encoder::norm_rows(const Norm& norm, Pass* pass) {
  const int width = spec_.hidden, ld = padded(width);
  Crew* crew = &pass->crew;
  crew->begin(pass->chunk.rows);
  for (int r = crew->next(); r >= 0; r = crew->next()) {
    float* x = pass->work.x + static_cast<size_t>(r) * ld;
    norm_row(pass->work.y + static_cast<size_t>(r) * ld, width, norm.weight, norm.bias, spec_.eps, kLayerNorm, x);
    for (int c = width; c < ld; ++c) x[c] = 0.f;
    put_left(pass->work.xl, r, x);
  }
  crew->barrier();
}

void Encoder::layer(const Layer& w, const Layer& next, Pass* pass) {
  const size_t ld = static_cast<size_t>(padded(spec_.hidden)), qkv_ld = static_cast<size_t>(padded(3 * spec_.hidden));
  const Chunk& chunk = pass->chunk;
  const Work& work = pass->work;
  Crew* crew = &pass->crew;
  const int rows = chunk.rows;
  multiply(Product{&w.qkv, &w.out, work.xl, rows, Then::kRows, 0, nullptr, nullptr, qkv_ld, work.qkv, Left{}}, crew);
  const Heads heads{work.qkv, qkv_ld, spec_.num_heads, spec_.head_dim,
                    1.f / std::sqrt(static_cast<float>(spec_.head_dim)), work.al};
  const int items = (chunk.end_seq - chunk.first_seq) * spec_.num_heads;
  crew->begin(items);
  for (int i = crew->next(); i >= 0; i = crew->next()) {
    const int seq = chunk.first_seq + i / spec_.num_heads;
    attend(heads, in_.starts[seq] - chunk.first, in_.starts[seq + 1] - in_.starts[seq], i % spec_.num_heads,
           pass->scratch);
  }
  crew->barrier();
  multiply(Product{&w.out, &w.up, work.al, rows, Then::kAdd, 0, work.y, work.x, ld, nullptr, Left{}}, crew);
  norm_rows(w.attn, pass);
  multiply(Product{&w.up, &w.down, work.xl, rows, Then::kAct, spec_.act, nullptr, nullptr, 0, nullptr, work.hl}, crew);
  multiply(Product{&w.down, &next.qkv, work.hl, rows, Then::kAdd, 0, work.y, work.x, ld, nullptr, Left{}}, crew);
  norm_rows(w.mlp, pass);
}

// By all members of the crew; ends with a barrier.
void Encoder::pool_rows(Pass* pass) {
  const Chunk& chunk = pass->chunk;
  const int width = spec_.hidden;
  const size_t ld = static_cast<size_t>(padded(width));
  const int out_width = spec_.num_labels > 0 ? spec_.num_labels : width;
  Crew* crew = &pass->crew;
  crew->begin(chunk.end_seq - chunk.first_seq);
  for (int i = crew->next(); i >= 0; i = crew->next()) {
    const int seq = chunk.first_seq + i;
    const int count = in_.starts[seq + 1] - in_.starts[seq];
    const float* rows = pass->work.x + static_cast<size_t>(in_.starts[seq] - chunk.first) * ld;
    float* pooled = pass->scratch;
    memcpy(pooled, spec_.pooling == kPoolLast ? rows + static_cast<size_t>(count - 1) * ld : rows, ld * sizeof(float));
    if (spec_.pooling == kPoolMean || spec_.pooling == kPoolMax || spec_.pooling == kPoolMeanSqrt) {
      for (int r = 1; r < count; ++r)
        for (int c = 0; c < static_cast<int>(ld); c += kPanel) {
          const V16 a = load16(pooled + c), b = load16(rows + static_cast<size_t>(r) * ld + c);
          store16(pooled + c, spec_.pooling == kPoolMax ? max16(a, b) : a + b);
        }
      const float n = static_cast<float>(count);
      const float by = spec_.pooling == kPoolMean ? 1.f / n : spec_.pooling == kPoolMeanSqrt ? 1.f / std::sqrt(n) : 1.f;
      for (int c = 0; c < static_cast<int>(ld); c += kPanel) store16(pooled + c, load16(pooled + c) * set16(by));
    }
    float* out = out_ + static_cast<size_t>(seq) * static_cast<size_t>(out_width);
    if (spec_.num_labels > 0)
      head(pooled, pooled + ld, out);
    else
      memcpy(out, pooled, static_cast<size_t>(width) * sizeof(float));
  }
  crew->barrier();
}

void Encoder::head(const float* pooled, float* scratch, float* out) const {
  const int width = spec_.hidden;
  for (int i = 0; i < width; ++i) {
    const float y = dot(head_dense_ + static_cast<size_t>(i) * width, pooled, width) + head_dense_bias_[i];
    scratch[i] = spec_.head_act == kEncoderTanh ? std::tanh(y) : y > 0.f ? y : 0.f;
  }
  for (int i = 0; i < spec_.num_labels; ++i)
    out[i] = dot(head_out_ + static_cast<size_t>(i) * width, scratch, width) + head_out_bias_[i];
}

}  // namespace naru
