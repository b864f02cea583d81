// The C interface that Python's ctypes calls. Errors are negative numbers; the caller knows what it asked for.
#include <new>

#include "gemm.h"
#include "gemm_tiles.h"
#include "mapped.h"
#include "model.h"
#include "tiles.h"
#include "validate.h"

#define NARU_API extern "C" __attribute__((visibility("default")))

using naru::Device;
using naru::Model;

NARU_API int naru_tiles(void) { return naru::tiles_allow() ? 1 : 0; }

NARU_API int64_t naru_segment_bytes(int32_t format, int32_t rows, int32_t k) {
  return static_cast<int64_t>(naru::segment_bytes(format, rows, k));
}

// Packs the rows of one segment into `out`, which is zeroed and holds naru_segment_bytes; on the calling thread.
NARU_API void naru_pack_segment(int32_t format, int32_t rows, int32_t k, const uint8_t* file, uint8_t* out) {
  naru::Segment s;
  s.format = format;
  s.rows = rows;
  s.panels = (rows + naru::kPanel - 1) / naru::kPanel;
  s.panel_bytes = naru::panel_bytes(format, k);
  s.data = out;
  naru::pack_panels(s, k, file, 0, s.panels);
}

// Makes pages present and adds up each chunk, unless `sums` is null. -1: they cannot be read.
NARU_API int32_t naru_fault_in(const uint8_t* address, int64_t bytes, uint64_t* sums, int64_t chunk_bytes) {
  return naru::fault_in(address, static_cast<size_t>(bytes), sums, static_cast<size_t>(chunk_bytes)) ? 0 : -1;
}

NARU_API Device* naru_device_new(int32_t num_threads) {
  Device* d = new (std::nothrow) Device(num_threads);
  if (d != nullptr && !d->reserve()) {
    delete d;
    return nullptr;
  }
  return d;
}

// How long members spin before they sleep: less where a quota counts spinning as work.
NARU_API void naru_device_spin(Device* d, int64_t cycles) { d->pool().spin_for(static_cast<uint64_t>(cycles)); }

// Its models are gone.
NARU_API void naru_device_free(Device* d) { delete d; }

// The workspace and how much of it models have claimed, for tests that poison it.
NARU_API uint8_t* naru_workspace(Device* d) { return d->workspace(); }

NARU_API int64_t naru_claimed_bytes(Device* d) { return static_cast<int64_t>(d->claimed()); }

// Bytes of the workspace that a model of these sizes will claim.
NARU_API int64_t naru_workspace_bytes(const naru::ModelSpec* spec, const naru::BufferSpec* buffers, int32_t count) {
  std::vector<naru::Buffer> made;
  for (int32_t i = 0; i < count; ++i) made.push_back(naru::make_buffer(buffers[i]));
  return static_cast<int64_t>(naru::lay_out(*spec, &made, nullptr).bytes);
}

NARU_API Model* naru_model_new(Device* device, const naru::ModelSpec* spec, const double* inverse_frequency) {
  Model* m = new (std::nothrow) Model(*spec, inverse_frequency, device);
  if (m != nullptr && !m->reserve()) {
    delete m;
    return nullptr;
  }
  return m;
}

NARU_API void naru_model_free(Model* m) { delete m; }

NARU_API int32_t naru_add_vector(Model* m, const float* values, int32_t n) { return m->add_vector(values, n); }

NARU_API int32_t naru_add_vector_view(Model* m, const float* values, uint64_t end) {
  return m->add_vector_view(values, end);
}

NARU_API int32_t naru_add_matrix(Model* m, int32_t k, int32_t num_parts, const int32_t* formats, const int32_t* rows,
                                 const uint8_t* const* data, const float* bias) {
  return m->add_matrix(k, num_parts, formats, rows, data, bias);
}

NARU_API int32_t naru_add_matrix_view(Model* m, int32_t k, int32_t num_parts, const int32_t* formats,
                                      const int32_t* rows, uint8_t* const* data, float* bias, uint64_t end) {
  return m->add_matrix_view(k, num_parts, formats, rows, data, bias, end);
}

NARU_API int32_t naru_finish(Model* m, const naru::BufferSpec* buffers, int32_t num_buffers,
                             const naru::Instruction* tape, int32_t count) {
  return m->finish(buffers, num_buffers, tape, count) ? 0 : -1;
}

// Before the first step: only the first `bytes` of the image are present.
NARU_API void naru_start_from(Model* m, uint64_t bytes) { m->readiness().start_from(bytes); }

NARU_API void naru_set_ready(Model* m, uint64_t bytes) { m->readiness().set(bytes); }

NARU_API void naru_fail(Model* m) { m->readiness().fail(); }

NARU_API void naru_wake(Model* m) { m->device().pool().wake(); }

// 0; -30: weights are still missing after max_wait_ns; -31: they will never come; else the number of a broken rule.
NARU_API int32_t naru_step(Model* m, const naru::StepInputs* in, const naru::SamplingInputs* sampling,
                           const naru::SamplingOutputs* out, float* logits, int64_t max_wait_ns) {
  const int32_t bad = naru::validate(m->spec(), *in, sampling);
  if (bad != 0) return bad;
  const naru::Readiness::State state = m->step(*in, sampling, out, logits, max_wait_ns);
  return state == naru::Readiness::kReady ? 0 : state == naru::Readiness::kPending ? -30 : -31;
}

NARU_API int64_t naru_claims(Model* m) { return static_cast<int64_t>(m->workspace_bytes()); }

// The blocks' content is void; their memory is the machine's until they are written again.
NARU_API void naru_release_blocks(Model* m, int32_t first, int32_t count) {
  const size_t bytes = m->kv().block_bytes();
  m->kv_arena().give_back(static_cast<size_t>(first) * bytes, static_cast<size_t>(count) * bytes);
}

// The KV arena, for tests that poison it.
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
    c->pool->barrier(member);
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
  naru::Pool& pool = m->device().pool();
  naru::Arena arena;
  if (!arena.reserve(padded * k * 8 + pool.size() * stride * sizeof(float) + 1024)) return -1;
  naru::Activations a{};
  a.width = w.k;
  a.f = const_cast<float*>(x);
  a.ld = k;
  a.wants_q = w.wants_quant;
  a.q = reinterpret_cast<int8_t*>(arena.take(padded * k));
  a.meta = reinterpret_cast<naru::GroupMeta*>(arena.take(padded * (k / naru::kGroup) * sizeof(naru::GroupMeta)));
  a.h = reinterpret_cast<naru::bf16*>(arena.take(padded * k * sizeof(naru::bf16)));
  for (int r = 0; r < rows; ++r) naru::emit_row(a, r, x + static_cast<size_t>(r) * k, tiles ? r : naru::kNoTileRow);
  LinearCall call{naru::Linear{&w, &a, rows, out, static_cast<size_t>(w.n), false, tiles, &w, nullptr}, &pool,
                  reinterpret_cast<float*>(arena.take(pool.size() * stride * sizeof(float))), stride, repeats};
  m->device().run(linear_call, &call);
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
