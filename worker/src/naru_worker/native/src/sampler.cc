#include "sampler.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "token_masks.h"

namespace naru {
namespace {

constexpr float kLowestLogprob = -9999.f;
constexpr float kGreedyBelow = 1e-5f;
constexpr int kBins = 2048;

struct Scratch {
  float* logits;    // processed
  double* weights;  // exp((logit - top) / temperature)
  int32_t* ids;     // candidates of the deciding bin
  int32_t* places;  // where what was gathered came from
  uint16_t* bins;   // bin of each id
  double* mass;     // [kBins]
  int32_t* counts;  // [kBins]
};

Scratch carve(uint8_t* p, int vocab) {
  Scratch s;
  const size_t n = (static_cast<size_t>(vocab) + 63) & ~size_t{63};
  s.weights = reinterpret_cast<double*>(p);
  s.mass = s.weights + n;
  s.logits = reinterpret_cast<float*>(s.mass + kBins);
  s.ids = reinterpret_cast<int32_t*>(s.logits + n);
  s.places = s.ids + n;
  s.counts = s.places + n;
  s.bins = reinterpret_cast<uint16_t*>(s.counts + kBins);
  return s;
}

// The best id, lowest on ties; NaN never wins. 0 when every logit is -inf or NaN.
int argmax(const float* x, int n) {
  // One pass over all, keeping the first of the blocks that hold the best, and a second one over that block.
  constexpr int kBlock = 1024;
  float top = kMinusInf;
  int found = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = begin + kBlock < n ? begin + kBlock : n;
    V16 best[4] = {set16(kMinusInf), set16(kMinusInf), set16(kMinusInf), set16(kMinusInf)};
    int i = begin;
    for (; i + 64 <= end; i += 64)
      for (int j = 0; j < 4; ++j) best[j] = max16(load16(x + i + 16 * j), best[j]);
    float high = hmax16(max16(max16(best[0], best[1]), max16(best[2], best[3])));
    for (; i < end; ++i) high = x[i] > high ? x[i] : high;
    if (high > top) {
      top = high;
      found = begin;
    }
  }
  if (top == kMinusInf) return 0;
  while (x[found] != top) ++found;
  return found;
}

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The order of candidates: best first, lower id on ties.
bool before(const float* logits, int32_t a, int32_t b) {
  return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
}

typedef double vd __attribute__((vector_size(kLanes * 4)));
typedef int64_t vl __attribute__((vector_size(kLanes * 4)));
typedef double vdu __attribute__((vector_size(kLanes * 4), aligned(8), may_alias));
typedef float vhalfu __attribute__((vector_size(kLanes * 2), aligned(4), may_alias));
constexpr int kDoubles = kLanes / 2;

// e^x for x in [-700, 0], to about one ulp. Source: Cody and Waite's reduction, Taylor series to r^13.
NARU_INLINE vd dexp(vd x) {
  const vd zero = {};
  const vd magic = 6755399441055744.0 - zero;  // 1.5 * 2^52
  const vd t = x * (1.4426950408889634074 - zero) + magic;
  const vd n = t - magic;
  vd r = x - n * (6.93145751953125e-1 - zero);
  r = r - n * (1.42860682030941723212e-6 - zero);
  vd p = 1.6059043836821613e-10 - zero;
  const double c[] = {2.08767569878681e-9,    2.505210838544172e-8,   2.7557319223985893e-7, 2.755731922398589e-6,
                      2.48015873015873016e-5, 1.98412698412698413e-4, 1.38888888888888894e-3, 8.33333333333333322e-3,
                      4.16666666666666644e-2, 1.66666666666666657e-1, 0.5,                    1.0,
                      1.0};
  for (double k : c) p = p * r + (k - zero);
  return (vd)((vl)p + ((vl)t << 52));
}

// weights[i] = exp((logits[i] - top) / temperature), 0 for -inf. May write up to 7 entries past n: the scratch is padded.
void weigh(const Scratch& s, int n, float top, double temperature) {
  const vd zero = {};
  const vd best = static_cast<double>(top) - zero, inverse = 1.0 / temperature - zero, floor = -700.0 - zero;
  for (int i = 0; i < n; i += kDoubles) {
    const vd x = __builtin_convertvector(*reinterpret_cast<const vhalfu*>(s.logits + i), vd);
    const vd z = (x - best) * inverse;
    const vd w = dexp(z > floor ? z : floor);
    *reinterpret_cast<vdu*>(s.weights + i) = z > floor ? w : zero;
  }
}

// Bins go from the heaviest weight down: 32 per factor e, until e^-64.
void count_bins(const Scratch& s, int n, float top, double temperature) {
  memset(s.mass, 0, kBins * sizeof(double));
  memset(s.counts, 0, kBins * sizeof(int32_t));
  const float step = static_cast<float>(32.0 / temperature);
  for (int i = 0; i < n; ++i) {
    const float z = (top - s.logits[i]) * step;
    const int b = z < static_cast<float>(kBins - 1) ? static_cast<int>(z) : kBins - 1;
    s.bins[i] = static_cast<uint16_t>(b);
    if (s.weights[i] > 0.0) {
      s.mass[b] += s.weights[i];
      ++s.counts[b];
    }
  }
}

// The candidates of a bin, in order.
int sorted_bin(const Scratch& s, int n, int bin) {
  int count = 0;
  for (int i = 0; i < n; ++i)
    if (s.bins[i] == bin && s.weights[i] > 0.0) s.ids[count++] = i;
  const float* logits = s.logits;
  std::sort(s.ids, s.ids + count, [logits](int32_t a, int32_t b) { return before(logits, a, b); });
  return count;
}

// How far down the ordered candidates a cut keeps: `count` of them, weighing `mass` together.
struct Kept {
  int64_t count;
  double mass;
};

// Walks the candidates from the best down; stops before the first one that `stop(count, mass, weight)` refuses.
template <typename Stop>
Kept walk(const Scratch& s, int n, Stop stop, int32_t* last) {
  Kept kept{0, 0.0};
  *last = -1;
  for (int b = 0; b < kBins; ++b) {
    if (s.counts[b] == 0) continue;
    // A bin that passes whole needs no sorting; its lightest member is bounded by the bin's edge, so test each when in doubt.
    const int count = stop.passes(kept, s.counts[b], s.mass[b], b) ? 0 : sorted_bin(s, n, b);
    if (count == 0) {
      kept.count += s.counts[b];
      kept.mass += s.mass[b];
      continue;
    }
    for (int i = 0; i < count; ++i) {
      if (stop.refuses(kept, s.weights[s.ids[i]])) return kept;
      kept.count += 1;
      kept.mass += s.weights[s.ids[i]];
      *last = s.ids[i];
    }
  }
  return kept;
}

// Keeps the first k.
struct TopK {
  int64_t k;
  bool passes(const Kept& kept, int count, double, int) const { return kept.count + count <= k; }
  bool refuses(const Kept& kept, double) const { return kept.count >= k; }
};

// Keeps at most `limit` candidates, until `mass` is reached, none lighter than `floor`.
struct Nucleus {
  int64_t limit;
  double mass;
  double floor;
  bool passes(const Kept& kept, int count, double weight, int bin) const {
    if (kept.count + count > limit || kept.mass + weight >= mass * (1.0 - 1e-9)) return false;
    // The bins' edges are computed in float: leave two bins of doubt.
    return bin < kBins - 1 && std::exp(-(bin + 3) / 32.0) >= floor;
  }
  bool refuses(const Kept& kept, double weight) const {
    return kept.count > 0 && (kept.count >= limit || kept.mass >= mass || weight < floor);
  }
};

// Finds where a running sum passes `goal`.
struct Draw {
  int64_t limit;
  double goal;
  bool passes(const Kept& kept, int count, double weight, int) const {
    // The bin with the last candidate is always walked, so that rounding at the end of the sum cannot lose the draw.
    return kept.count + count < limit && kept.mass + weight <= goal * (1.0 - 1e-12);
  }
  bool refuses(const Kept& kept, double) const { return kept.count > 0 && (kept.count >= limit || kept.mass > goal); }
};

void apply_bias_and_penalties(const SamplingInputs& in, int row, float* x) {
  const float repetition = in.repetition_penalty[row];
  const float presence = in.presence_penalty[row], frequency = in.frequency_penalty[row];
  for (int i = in.penalty_start[row]; i < in.penalty_start[row + 1]; ++i) {
    const int id = in.penalty_ids[i];
    if (id >= in.vocab_limit) continue;
    const int count = in.penalty_counts[i];
    float v = x[id];
    v = v > 0.f ? v / repetition : v * repetition;
    if (count > 0) v -= presence + frequency * static_cast<float>(count);
    x[id] = clean(v);
  }
  for (int i = in.bias_start[row]; i < in.bias_start[row + 1]; ++i)
    if (in.bias_ids[i] < in.vocab_limit) x[in.bias_ids[i]] = clean(x[in.bias_ids[i]] + in.bias_values[i]);
  for (int i = in.banned_start[row]; i < in.banned_start[row + 1]; ++i)
    if (in.banned_ids[i] < in.vocab_limit) x[in.banned_ids[i]] = kMinusInf;
}

bool is_banned(const SamplingInputs& in, int row, int id) {
  bool banned = false;
  for (int i = in.banned_start[row]; i < in.banned_start[row + 1]; ++i) banned = banned || in.banned_ids[i] == id;
  return banned;
}

// Whether some banned id could be drawn.
bool bans_any(const SamplingInputs& in, int row, const uint32_t* mask) {
  bool bans = false;
  for (int i = in.banned_start[row]; i < in.banned_start[row + 1]; ++i)
    bans = bans || (in.banned_ids[i] < in.vocab_limit && is_in(mask, in.banned_ids[i]));
  return bans;
}

// When nothing is possible: the lowest id of the mask that is not banned, else the lowest of the mask, else 0.
int first_allowed(const SamplingInputs& in, int row, const uint32_t* mask) {
  for (int id = 0; id < in.vocab_limit; ++id)
    if (is_in(mask, id) && !is_banned(in, row, id)) return id;
  for (int id = 0; id < in.vocab_limit && mask != nullptr; ++id)
    if (is_in(mask, id)) return id;
  return 0;
}

int draw(const SamplingInputs& in, int row, const uint32_t* mask, const Scratch& s, int best) {
  const float top = s.logits[best];
  const int gathered = mask == nullptr ? 0 : gather(s.logits, s.places, mask, in.vocab_limit);
  const int n = gathered > 0 ? gathered : in.vocab_limit;
  const double temperature = static_cast<double>(in.temperature[row]);
  weigh(s, n, top, temperature);
  count_bins(s, n, top, temperature);
  int32_t last;
  const int64_t k = in.top_k[row] > 0 ? in.top_k[row] : n;
  Kept kept = walk(s, n, TopK{k}, &last);
  if (in.top_p[row] < 1.f || in.min_p[row] > 0.f) {
    // top_p = 1 keeps all, whatever rounding says of the sum.
    const double mass = in.top_p[row] < 1.f ? static_cast<double>(in.top_p[row]) * kept.mass : HUGE_VAL;
    kept = walk(s, n, Nucleus{kept.count, mass, static_cast<double>(in.min_p[row])}, &last);
  }
  const double goal = uniform(in.seed[row], in.counter[row]) * kept.mass;
  walk(s, n, Draw{kept.count, goal}, &last);
  return last < 0 ? best : gathered > 0 ? s.places[last] : last;
}

int choose(const SamplingInputs& in, int row, const float* logits, const uint32_t* mask, const Scratch& s) {
  const int n = in.vocab_limit;
  const bool edits = in.penalty_start[row] != in.penalty_start[row + 1] ||
                     in.bias_start[row] != in.bias_start[row + 1] || bans_any(in, row, mask);
  const bool greedy = in.temperature[row] < kGreedyBelow || in.top_k[row] == 1 || in.top_p[row] == 0.f ||
                      in.min_p[row] == 1.f;
  if (greedy && !edits) {
    const int best = mask == nullptr ? argmax(logits, n) : masked_argmax(logits, mask, n);
    return best >= 0 ? best : first_allowed(in, row, mask);
  }
  if (mask == nullptr)
    clean_copy(logits, n, s.logits);
  else
    masked_copy(logits, mask, n, s.logits);
  apply_bias_and_penalties(in, row, s.logits);
  const int best = argmax(s.logits, n);
  if (s.logits[best] == kMinusInf) return first_allowed(in, row, mask);
  return greedy ? best : draw(in, row, mask, s, best);
}

// Raw log-probabilities: the log of the sum of exponentials, and the top k by insertion.
void score(const SamplingInputs& in, const SamplingOutputs& out, int row, const float* logits, const Scratch& s) {
  const int n = in.vocab_limit;
  clean_copy(logits, n, s.logits);
  const float* x = s.logits;
  const int best = argmax(x, n);
  const double top = static_cast<double>(x[best]);
  const bool possible = x[best] != kMinusInf;
  double sum = 0.0;
  if (possible) {
    weigh(s, n, x[best], 1.0);
    for (int i = 0; i < n; ++i) sum += s.weights[i];
  }
  const double log_sum = possible ? top + std::log(sum) : 0.0;
  auto logprob = [&](int id) {
    if (x[id] == kMinusInf) return kLowestLogprob;
    const float lp = static_cast<float>(static_cast<double>(x[id]) - log_sum);
    return lp < kLowestLogprob ? kLowestLogprob : lp;
  };
  const int chosen = out.token_ids[row];
  if (chosen >= n) {  // a prompt token outside the reported vocabulary
    out.ranks[row] = n;
    out.logprobs[row] = kLowestLogprob;
  }
  int rank = 1;
  if (chosen < n) {
    for (int i = 0; i < n; ++i) rank += x[i] > x[chosen] || (x[i] == x[chosen] && i < chosen);
    out.ranks[row] = rank;
    out.logprobs[row] = logprob(chosen);
  }
  const int width = in.max_logprobs;
  const int k = std::min(std::max(in.num_logprobs[row], 0), std::min(width, n));
  int32_t* ids = out.top_ids + static_cast<size_t>(row) * width;
  int held = 0;
  for (int i = 0; i < n && k > 0; ++i) {
    if (held == k && !(x[i] > x[ids[k - 1]])) continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && x[i] > x[ids[at - 1]]; --at) ids[at] = ids[at - 1];
    ids[at] = i;
  }
  for (int i = 0; i < held; ++i) out.top_logprobs[static_cast<size_t>(row) * width + i] = logprob(ids[i]);
}

}  // namespace

double uniform(uint64_t seed, uint64_t counter) {
  // SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: stream `seed`, element `counter`. The seed is
  // mixed first so that neighbouring seeds do not give shifted copies of one stream.
  const uint64_t z = mix(mix(seed + 0x9e3779b97f4a7c15ull) + (counter + 1) * 0x9e3779b97f4a7c15ull);
  return static_cast<double>(z >> 11) * 0x1.0p-53;
}

size_t sampler_scratch_bytes(int vocab) {
  const size_t n = (static_cast<size_t>(vocab) + 63) & ~size_t{63};
  return n * (sizeof(double) + sizeof(float) + 2 * sizeof(int32_t) + sizeof(uint16_t)) +
         kBins * (sizeof(double) + sizeof(int32_t)) + 64;
}

void sample_row(const SamplingInputs& in, const SamplingOutputs& out, int row, const float* logits, int vocab,
                uint8_t* scratch) {
  const Scratch s = carve(scratch, vocab);
  const bool given = in.target[row] >= 0;
  const bool masked = !given && in.mask_rows != nullptr && in.mask_rows[row] >= 0;
  if (masked && !await_masks(in)) {
    out.token_ids[row] = -1;
    return;
  }
  const uint32_t* mask = masked ? in.masks + static_cast<size_t>(in.mask_rows[row]) * in.mask_words : nullptr;
  out.token_ids[row] = given ? in.target[row] : choose(in, row, logits, mask, s);
  if (given || in.num_logprobs[row] >= 0) score(in, out, row, logits, s);
}

}  // namespace naru
