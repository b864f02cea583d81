// Scores of a block of rows over a span to weights of the softmax, in floats.
#pragma once

#include "prompt_walk.h"

namespace naru {

// 2^x within 2e-7; x above -126, or the result is as small as that.
NARU_INLINE vf exp2_float(vf x) {
#if defined(__AVX512F__)
  const vf r = (vf)_mm512_reduce_ps((__m512)x, 0);  // x - round(x)
#else
  const vf lo = vset(-126.f), hi = vset(126.f);
  x = x > lo ? x : lo;
  x = x < hi ? x : hi;
  const vf t = x + vset(12582912.f);  // 1.5 * 2^23: the rounded x sits in the low mantissa bits
  const vf r = x - (t - vset(12582912.f));
#endif
  vf p = vset(0.00132647267f);
  p = p * r + vset(0.00967151268f);
  p = p * r + vset(0.0555073375f);
  p = p * r + vset(0.240222421f);
  p = p * r + vset(0.693146978f);
  p = p * r + vset(1.f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, _mm512_sub_ps((__m512)x, (__m512)r));
#else
  return (vf)((vi)p + ((vi)t << 23));
#endif
}

// Scores of a span that all rows see to weights, in place. False: some row's top has to move first; the rows' state is
// then as before, but the scores are gone.
template <bool kShift>
bool soften_all(PromptRows* t, int block, float* s) {
  V16 high = set16(0.f);
  for (int r = 0; r < kBlockRows; ++r, s += kSpan) {
    V16 sum = load16(t->sums + (block * kBlockRows + r) * 16);
    const V16 top = set16(t->top[block * kBlockRows + r]);
    for (int c = 0; c < kSpan; c += 16) {
      V16 x = load16(s + c);
      if (kShift) x = x - top;
      for (int i = 0; i < kParts; ++i) x.v[i] = exp2_float(x.v[i]);
      store16(s + c, x);
      sum = sum + x;
    }
    store16(t->next + r * 16, sum);
    high = max16(sum, high);
  }
  if (hmax16(high) >= kGrownSum) return false;
  t->commit_sums(block);
  return true;
}

inline void soften_row(PromptRows* t, int r, int span, int columns, float* s) {
  alignas(64) static const float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf lo = vset(static_cast<float>(t->begin[r] - span)), hi = vset(static_cast<float>(t->end[r] - span));
  V16 best = set16(kNever);
  for (int c = 0; c < columns * 16; c += 16) {
    V16 x = load16(s + c);
    const V16 at = load16(kIndex) + set16(static_cast<float>(c));
    for (int i = 0; i < kParts; ++i) {
      const vi seen = (vi)(at.v[i] >= lo) & (vi)(at.v[i] < hi);
      x.v[i] = seen ? x.v[i] : vset(kNever);
    }
    store16(s + c, x);
    best = max16(x, best);
  }
  const float high = hmax16(best);
  const V16 top = set16(high > kNever ? t->raise_top(r, high) : 0.f);
  V16 sum = load16(t->sums + r * 16);
  for (int c = 0; c < columns * 16; c += 16) {
    const V16 x = load16(s + c);
    V16 p = x - top;
    for (int i = 0; i < kParts; ++i) p.v[i] = x.v[i] > vset(kNever) ? exp2_float(p.v[i]) : vset(0.f);
    store16(s + c, p);
    sum = sum + p;
  }
  store16(t->sums + r * 16, sum);
}

// Scores at s, [kBlockRows][kSpan], to weights in place; score() makes the scores once more.
template <class Score>
void soften_span(PromptRows* t, const PromptUnit& u, float* s, Score score) {
  if (t->state[u.block] != kFresh && t->sees_all(u.block, u.span)) {
    if (t->state[u.block] == kLevel ? soften_all<false>(t, u.block, s) : soften_all<true>(t, u.block, s)) return;
    score();
  }
  for (int r = 0; r < kBlockRows; ++r) soften_row(t, u.block * kBlockRows + r, u.span, u.columns, s + r * kSpan);
  t->update_state(u.block);
}

}  // namespace naru
