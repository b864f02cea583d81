// The C interface that Python's ctypes calls. Errors are negative numbers; the caller knows what it asked for.
#include <new>

#include "gemm.h"
#include "gemm_tiles.h"
#include "model.h"
#include "tiles.h"
#include "validate.h"

#define NARU_API extern "C" __attribute__((visibility("default")))

using naru::Model;

NARU_API int naru_tiles(void) { return naru::tiles_allow() ? 1 : 0; }

NARU_API int64_t naru_segment_bytes(int32_t format, int32_t rows, int32_t k) {
  return static_cast<int64_t>(naru::segment_bytes(format, rows, k));
}

NARU_API Model* naru_model_new(const naru::ModelSpec* spec, const double* inverse_frequency) {
  Model* m = new (std::nothrow) Model(*spec, inverse_frequency);
  if (m != nullptr && !m->reserve()) {
    delete m;
    return nullptr;
  }
  return m;
}

NARU_API void naru_model_free(Model* m) { delete m; }

NARU_API int32_t naru_add_vector(Model* m, const float* values, int32_t n) { return m->add_vector(values, n); }

NARU_API int32_t naru_add_matrix(Model* m, int32_t k, int32_t num_parts, const int32_t* formats, const int32_t* rows,
                                 const uint8_t* const* data, const float* bias) {
  return m->add_matrix(k, num_parts, formats, rows, data, bias);
}

NARU_API int32_t naru_add_buffer(Model* m, int32_t width, int32_t wants_f, int32_t wants_q, int32_t gathered) {
  return m->add_buffer(width, wants_f != 0, wants_q != 0, gathered != 0);
}

NARU_API int32_t naru_finish(Model* m, const naru::Instruction* tape, int32_t count) {
  return m->finish(tape, count) ? 0 : -1;
}

NARU_API void naru_wake(Model* m) { m->pool().wake(); }

NARU_API int32_t naru_step(Model* m, const naru::StepInputs* in, const naru::SamplingInputs* sampling,
                           const naru::SamplingOutputs* out, float* logits) {
  const int32_t bad = naru::validate(m->spec(), *in, sampling);
  if (bad != 0) return bad;
  m->step(*in, sampling, out, logits);
  return 0;
}

NARU_API int64_t naru_activation_bytes(Model* m) { return static_cast<int64_t>(m->activation_bytes()); }

// The KV arena, for tests that poison it and for moving blocks.
NARU_API uint8_t* naru_kv_base(Model* m) { return m->kv_arena().base(); }

NARU_API int64_t naru_kv_bytes(Model* m) { return static_cast<int64_t>(m->kv_arena().size()); }

NARU_API double naru_uniform(uint64_t seed, uint64_t counter) { return naru::uniform(seed, counter); }

NARU_API void naru_matrix_row(Model* m, int32_t matrix, int32_t row, float* out) {
  naru::matrix_row(m->matrix(matrix), row, out);
}

namespace {

struct LinearCall {
  naru::Linear job;
  naru::Pool* pool;
  float* scratch;
  size_t scratch_stride;
  int repeats;
};

void linear_call(void* ctx, int member) {
  LinearCall* c = static_cast<LinearCall*>(ctx);
  naru::Linear job = c->job;
  job.scratch = c->scratch + member * c->scratch_stride;
  for (int i = 0; i < c->repeats; ++i) {
    naru::linear(job, c->pool, member);
    c->pool->barrier();
  }
}

}  // namespace

// One linear layer alone, `repeats` times: for tests and the kernel benchmark. x (rows, k), out (rows, n).
NARU_API int32_t naru_linear(Model* m, int32_t matrix, const float* x, int32_t rows, float* out, int32_t repeats) {
  const naru::Matrix& w = m->matrix(matrix);
  const size_t k = static_cast<size_t>(w.k), padded = (static_cast<size_t>(rows) + 31) / 32 * 32;
  const size_t stride = (naru::tile_scratch_floats(w.k) + 15) / 16 * 16;
  const bool tiles = naru::kHasTiles && w.wants_quant && rows >= naru::kFloatTileRows;
  if (tiles && rows > naru::kMaxTileRows) return -2;
  naru::Arena arena;
  if (!arena.reserve(padded * k * 8 + m->pool().size() * stride * sizeof(float) + 1024)) return -1;
  naru::Activations a{};
  a.width = w.k;
  a.f = const_cast<float*>(x);
  a.ld = k;
  a.wants_q = w.wants_quant;
  a.q = reinterpret_cast<int8_t*>(arena.take(padded * k));
  a.meta = reinterpret_cast<naru::GroupMeta*>(arena.take(padded * (k / naru::kGroup) * sizeof(naru::GroupMeta)));
  a.h = reinterpret_cast<naru::bf16*>(arena.take(padded * k * sizeof(naru::bf16)));
  for (int r = 0; r < rows; ++r) naru::emit_row(a, r, x + static_cast<size_t>(r) * k, tiles ? r : naru::kNoTileRow);
  LinearCall call{naru::Linear{&w, &a, rows, out, static_cast<size_t>(w.n), false, tiles, &w, nullptr}, &m->pool(),
                  reinterpret_cast<float*>(arena.take(m->pool().size() * stride * sizeof(float))), stride, repeats};
  m->pool().run(linear_call, &call);
  return 0;
}

// Samples `rows` rows of the given logits (rows, vocab), on the calling thread: for tests.
NARU_API void naru_sample(const naru::SamplingInputs* in, const naru::SamplingOutputs* out, int32_t rows,
                          const float* logits, int32_t vocab) {
  std::vector<uint8_t> scratch(naru::sampler_scratch_bytes(vocab) + 64);
  uint8_t* p = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  for (int r = 0; r < rows; ++r)
    naru::sample_row(*in, *out, r, logits + static_cast<size_t>(r) * vocab, vocab, p);
}
