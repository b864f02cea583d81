// Scale and minimum of a unit's groups as float registers, for the vector kernels.
#pragma once

#include "matrix.h"

namespace naru {

// Group i of the unit: w = d q + m for nibbles, d alone for kW8; lanes [lane, lane + kLanes) of the panel.
template <int F>
NARU_INLINE void group_scales(const uint8_t* unit, int i, int lane, vf* d, vf* m) {
  if (F == kW4K) {
    const f16* super = reinterpret_cast<const f16*>(unit + kW4KSuperAt) + lane;
    *d = vload(super) * vload(unit + scale_at(F, i) + lane);
    *m = -vload(super + kPanel) * vload(unit + kW4KMinAt + i * kPanel + lane);
  } else {
    *d = vload(reinterpret_cast<const f16*>(unit + scale_at(F, i)) + lane);
    *m = F == kW4M ? vload(reinterpret_cast<const f16*>(unit + kW4MinAt) + lane) : *d * vset(-8.f);
  }
}

// The scales of both halves of group i of a kW6K unit.
NARU_INLINE void half_scales(const uint8_t* unit, int i, int lane, vf* d0, vf* d1) {
  const vf d = vload(reinterpret_cast<const f16*>(unit + kW6KSuperAt) + lane);
  const int8_t* sc = reinterpret_cast<const int8_t*>(unit + scale_at(kW6K, i)) + lane;
  *d0 = d * vload(sc);
  *d1 = d * vload(sc + kPanel);
}

}  // namespace naru
