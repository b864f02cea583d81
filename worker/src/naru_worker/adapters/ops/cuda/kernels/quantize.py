"""Rounding of float32 tiles to 8 bits inside other kernels: signed bytes, and floats of 4 exponent and 3 mantissa bits.

Both keep a float32 scale by which a value is to be multiplied when it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

FP8_MAX = 448.0
"""Largest number of ``float8_e4m3fn``."""
FP8_ARCHITECTURES = (89, 90)
"""Those that convert to and from fp8; on sm_80 the backend asks for none."""

_FP8_MAX = tl.constexpr(FP8_MAX)
_SMALLEST = tl.constexpr(1e-30)
"""Rows that are smaller are rounded to zeros: the reciprocal of their scale might be infinite."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it leaves no bits for fractions, so the sum is rounded to the nearest (even) whole number."""

_FP8_ROUND = tl.constexpr(12582912.0 * 2.0**-9)
"""The same for multiples of 2**-9, the smallest fp8."""


@triton.jit
def _factor(largest, limit):
    is_small = largest < _SMALLEST
    return tl.where(is_small, 0.0, tl.div_rn(limit + tl.zeros_like(largest), tl.where(is_small, 1.0, largest)))


_IS_INTERPRETED = tl.constexpr(isinstance(_factor, InterpretedFunction))


@triton.jit
def to_fp8(x):
    """Float32 to fp8 e4m3, the nearest one, halves to even, saturating."""
    x = tl.clamp(x, -_FP8_MAX, _FP8_MAX)
    if _IS_INTERPRETED:
        x = _fp8_grid(x)
    return x.to(tl.float8e4nv)


@triton.jit
def _fp8_grid(x):
    """The nearest float32 that fp8 has: the interpreter's conversion goes wrong wherever it would have to round."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, (x + _FP8_ROUND) - _FP8_ROUND, rounded)


@triton.jit
def fp8_scale(largest):
    """The scale of values up to `largest`, and what they are multiplied by before they are rounded."""
    return tl.div_rn(largest, _FP8_MAX), _factor(largest, _FP8_MAX)


@triton.jit
def int8_scale(largest):
    """The same for signed bytes."""
    return tl.div_rn(largest, 127.0), _factor(largest, 127.0)


@triton.jit
def to_int8(x):
    """Float32 in [-127, 127] to signed bytes, halves to even."""
    return ((x + _ROUND) - _ROUND).to(tl.int8)
