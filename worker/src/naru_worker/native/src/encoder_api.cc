// The C interface of encoders. Errors are negative numbers; the caller knows what it asked for.
#include <new>

#include "encoder.h"

#define NARU_API extern "C" __attribute__((visibility("default")))

using naru::Encoder;

NARU_API int64_t naru_encoder_weight_bytes(const naru::EncoderSpec* spec) {
  return static_cast<int64_t>(Encoder::weight_bytes(*spec));
}

NARU_API int64_t naru_encoder_workspace_bytes(const naru::EncoderSpec* spec) {
  return static_cast<int64_t>(Encoder::workspace_bytes(*spec));
}

// Null: the machine has not enough memory.
NARU_API Encoder* naru_encoder_new(naru::Device* device, const naru::EncoderSpec* spec) {
  Encoder* e = new (std::nothrow) Encoder(*spec, device);
  if (e != nullptr && !e->reserve()) {
    delete e;
    return nullptr;
  }
  return e;
}

NARU_API void naru_encoder_free(Encoder* e) { delete e; }

// -1: there is no such tensor.
NARU_API int32_t naru_encoder_put(Encoder* e, int32_t tensor, const float* values) { return e->put(tensor, values) ? 0 : -1; }

// 0, or the number of a broken rule. out (num_seqs, hidden or num_labels)
NARU_API int32_t naru_encode(Encoder* e, const naru::EncoderInputs* in, float* out) {
  const int32_t bad = e->validate(*in);
  if (bad == 0) e->encode(*in, out);
  return bad;
}
