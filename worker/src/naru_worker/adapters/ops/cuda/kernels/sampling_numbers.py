"""Numbers that the sampler's kernels share: what a row needs, clean logits, their order, a row's random number."""

from __future__ import annotations

import triton
import triton.language as tl

DRAWS = 1
"""A row's token is left to chance. Without it a row takes its best token, or has a target."""
EDITED = 2
"""A mask, penalties, biases or bans change a row's logits before its token is chosen."""
SCORED = 4
"""The chosen token's log-probability and rank are asked for."""
IMPOSSIBLE = 8
"""The row's mask never came: its token is -1."""

CHUNK = 4096
"""Logits of one row that one program looks at."""
LOWEST_LOGPROB = -9999.0
_USUAL_CHUNKS = 64

IS_DRAWN = tl.constexpr(DRAWS)
IS_EDITED = tl.constexpr(EDITED)
IS_SCORED = tl.constexpr(SCORED)
IS_IMPOSSIBLE = tl.constexpr(IMPOSSIBLE)
LOWEST = tl.constexpr(LOWEST_LOGPROB)
NONE = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(2**31 - 1)
_LARGEST = tl.constexpr(3.4028234663852886e38)


def padded_chunks(chunks: int) -> int:
    """Room for a row's chunks, a power of two: the same, and so the same code, for vocabularies of up to 262,144."""
    return max(_USUAL_CHUNKS, int(triton.next_power_of_2(chunks)))


@triton.jit
def clean(x):
    """Float32 logits without NaN, +inf and -0."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x != x, NONE, x), _LARGEST) + 0.0  # noqa: PLR0124 (NaN)


@triton.jit
def order(x):
    """Int32 that are ordered as float32 are."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(key):
    """The float32 of an `order`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(seed, counter):
    """Float64 in [0, 1) with 53 bits, the number that `sampling_ref.uniform` gives.

    Source: SplitMix64 (Steele, Lea and Flood, 2014) used as a counter-based generator.
    """
    start = _mixed(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    step = (counter.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15
    return (_mixed(start + step) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
