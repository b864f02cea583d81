// Token masks in the sampler: what they leave of a row of logits, and how they are waited for.
#pragma once

#include <time.h>

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "readiness.h"
#include "sampler.h"
#include "simd.h"

namespace naru {

constexpr float kMinusInf = -__builtin_inff();

// NaN counts as impossible; +inf as the largest number, so that differences stay defined.
inline float clean(float x) { return x != x ? kMinusInf : x > FLT_MAX ? FLT_MAX : x; }

inline void clean_copy(const float* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = clean(x[i]);
}

// As clean_copy, but what the mask does not allow is impossible.
inline void masked_copy(const float* x, const uint32_t* mask, int n, float* out) {
  for (int first = 0; first < n; first += 32) {
    const uint32_t bits = mask[first / 32];
    const int count = std::min(32, n - first);
    if (bits == 0) {
      for (int i = 0; i < count; ++i) out[first + i] = kMinusInf;
    } else if (bits == ~uint32_t{0}) {
      clean_copy(x + first, count, out + first);
    } else {
      for (int i = 0; i < count; ++i) out[first + i] = (bits >> i & 1) != 0 ? clean(x[first + i]) : kMinusInf;
    }
  }
}

// The best id among what the mask allows, lowest on ties; -1 when none of it is possible. Words of the mask that are empty
// cost no reading, and those without a larger number, allowed or not, no closer look: nearly all of them.
inline int masked_argmax(const float* x, const uint32_t* mask, int n) {
  float top = kMinusInf;
  int at = -1;
  for (int first = 0; first < n; first += 32) {
    uint32_t bits = mask[first / 32];
    if (bits == 0) continue;
    const int count = std::min(32, n - first);
    if (count == 32) {
      const V16 low = load16(x + first), high = load16(x + first + 16);
      if (!(hmax16(max16(low, max16(high, set16(kMinusInf)))) > top)) continue;
    }
    for (; bits != 0; bits &= bits - 1) {
      const int i = first + __builtin_ctz(bits);
      if (i >= n || !(x[i] > top)) continue;
      top = x[i];
      at = i;
    }
  }
  return at;
}

inline bool is_in(const uint32_t* mask, int id) { return mask == nullptr || (mask[id / 32] >> (id % 32) & 1) != 0; }

// Where a mask leaves few ids, their logits are moved to the front, in order, so that a draw looks at nothing else; where
// they came from goes into `places`. Gives how many there are; 0: too many to be worth it.
inline int gather(float* logits, int32_t* places, const uint32_t* mask, int n) {
  int count = 0;
  for (int first = 0; first < n; first += 32) count += __builtin_popcount(mask[first / 32]);
  if (count > n / 4) return 0;
  count = 0;
  for (int first = 0; first < n; first += 32) {
    for (uint32_t bits = mask[first / 32]; bits != 0; bits &= bits - 1) {
      const int i = first + __builtin_ctz(bits);
      if (i >= n) break;
      places[count] = i;
      logits[count++] = logits[i];
    }
  }
  return count;
}

// Waits until the masks are written. Most often they are: a forward pass takes longer. False: it took too long, for this
// row and for all that ask later, so that a step waits once.
inline bool await_masks(const SamplingInputs& in) {
  int32_t gate = 0;
  const auto is_closed = [&] { return (gate = __atomic_load_n(in.mask_gate, __ATOMIC_ACQUIRE)) == 0; };
  for (int spins = 0; spins < 1000 && is_closed(); ++spins) _mm_pause();
  if (gate != 0) return gate > 0;
  const int64_t deadline_ns = monotonic_ns() + int64_t{1000000} * in.mask_wait_ms;
  while (is_closed()) {
    if (monotonic_ns() > deadline_ns) {
      if (__atomic_compare_exchange_n(in.mask_gate, &gate, -1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return false;
      break;
    }
    // Whoever writes them may want this core; there is nobody to wake a sleeper on a lock.
    const timespec pause{0, 20000};
    nanosleep(&pause, nullptr);
  }
  return gate > 0;
}

}  // namespace naru
