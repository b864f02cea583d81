"""What both attention kernels do with a tile: its addresses in the paged cache, its numbers, a step of the softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1.0e30)
"""Where a row's largest score begins: finite, so that a row that sees nothing of a tile does not make NaNs."""
VALUE_GAIN = tl.constexpr(128.0)
"""Scales of int8 values are multiplied by it, so that weight times scale is about as large as the value that is meant:
float16 would hold the product of a small weight and max|v| / 127 as a subnormal number."""

LOG2_E = 1.4426950408889634
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
"""Head sizes that kernels are compiled for ahead of time; others run with the tiles of the next power of two."""
_FIRST_ARCH_WITH_E4M3 = 89


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program cuts its work."""

    block_m: int
    """Rows: query tokens times the query heads of a kv head. Decoding takes the least that holds its rows."""
    block_n: int
    """Tokens of the cache."""
    num_warps: int
    num_stages: int


@triton.jit
def at_head(keys, values, kv_head, head_stride):
    """Where a kv head's numbers begin."""
    offset = kv_head.to(tl.int64) * head_stride
    return keys + offset, values + offset


@triton.jit
def blocks_of(table, first, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks of a tile of tokens of a sequence that has `end`; `first` is a multiple of BLOCK_N.

    What is beyond the end, all of the tile perhaps, gets the last block: the table is not read where there is none.
    """
    column = first // BLOCK_SIZE + tl.arange(0, BLOCK_N) // BLOCK_SIZE
    return tl.load(table + tl.minimum(column, tl.maximum(end - 1, 0) // BLOCK_SIZE))


@triton.jit
def places_of(first, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Places in their blocks of a tile of tokens; the same for all tiles, if the compiler can see it."""
    if BLOCK_N >= BLOCK_SIZE:
        places = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    else:
        places = first % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    return places


@triton.jit
def load_tile(cache, offsets, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_N, BLOCK_D) of the cache; zeros beyond HEAD_DIM and where not `inside`, where anything may lie."""
    d = tl.arange(0, BLOCK_D)
    at = cache + (offsets[:, None] + d[None, :])
    if inside is None and HEAD_DIM == BLOCK_D:
        tile = tl.load(at)
    elif inside is None:
        tile = tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(at, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_scales(scales, offsets, inside):
    """(1, BLOCK_N) scales; zeros where not `inside`."""
    if inside is None:
        loaded = tl.load(scales + offsets)
    else:
        loaded = tl.load(scales + offsets, mask=inside, other=0.0)
    return loaded[None, :]


@triton.jit
def as_factors(stored, like):
    """Numbers as they are stored in the cache, in the type of the other factor; scales are not in them yet."""
    if stored.dtype == tl.int8 and like.dtype == tl.float16:
        # 1024 + 128 + x has the bits of x + 128 in its mantissa: no conversion from integers, which is slow.
        shifted = (stored.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        factors = shifted.to(tl.float16, bitcast=True) - 1152.0
    elif stored.dtype == tl.uint8:
        # The bits of an e4m3, on GPUs that know no such type: moved in place they are a float16, 2^8 too small.
        bits = ((stored & 0x80).to(tl.uint16) << 8) | ((stored & 0x7F).to(tl.uint16) << 7)
        factors = (bits.to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        factors = stored.to(like.dtype)
    return factors


@triton.jit
def as_queries(q, key_cache):
    """Queries in the type that the products are computed in: float16 with a cache of bytes, which it holds exactly."""
    if key_cache.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        queries = q.to(tl.float16)
    else:
        queries = q
    return queries


@triton.jit
def softmax_step(scores, largest, total, scale):
    """Online softmax in base 2: a tile's weights, what older sums shrink by, and the new largest score and sum.

    Multiply-adds are explicit: masked and unmasked loops must round alike, or a row's bits would depend on its chunk.
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_largest[:, None]))
    shrink = tl.exp2(largest - new_largest)
    return weights, shrink, new_largest, tl.fma(total, shrink, tl.sum(weights, 1))


@triton.jit
def attend_tile(state, q, caches, scales, blocks, places, inside, seen, scale, strides, shape: tl.constexpr):
    """One tile of keys and values, tokens at `places` in `blocks`, for rows that see of it what is `seen`.

    `state` is (sums, largest, total) of each row; `inside` and `seen` are None where all is. Returns the new state.
    """
    acc, largest, total = state
    HEAD_DIM: tl.constexpr = shape[0]
    BLOCK_D: tl.constexpr = shape[1]
    block = blocks.to(tl.int64)
    place = places.to(tl.int64)
    offsets = block * strides[0] + place * strides[1]
    k = as_factors(load_tile(caches[0], offsets, inside, HEAD_DIM, BLOCK_D), q)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if scales is not None:
        scale_offsets = block * strides[2] + place * strides[3]
        scores = scores * load_scales(scales[0], scale_offsets, inside)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    weights, shrink, largest, total = softmax_step(scores, largest, total, scale)
    if scales is not None:
        weights = weights * (load_scales(scales[1], scale_offsets, inside) * VALUE_GAIN)
    v = as_factors(load_tile(caches[1], offsets, inside, HEAD_DIM, BLOCK_D), q)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, largest, total


@triton.jit
def normalised(acc, total, scales):
    """What the rows' sums come to: divided by their weights; zeros for rows that saw nothing."""
    norm = 1.0 / tl.where(total > 0.0, total, 1.0)
    if scales is not None:
        norm = norm * (1.0 / VALUE_GAIN)
    return acc * norm[:, None]


def stored_cache(cache: Tensor, arch: int) -> Tensor:
    """The cache as a kernel gets it: bytes, where the GPU knows no float8_e4m3fn."""
    is_e4m3 = cache.dtype == torch.float8_e4m3fn
    return cache.view(torch.uint8) if is_e4m3 and arch < _FIRST_ARCH_WITH_E4M3 else cache


def cache_strides(
    key_cache: Tensor, value_cache: Tensor, key_scales: Tensor | None, value_scales: Tensor | None
) -> tuple[int, ...]:
    """Strides of block, token and head, of the caches and of their scales (zeros without); keys' are values' too."""
    assert key_cache.stride() == value_cache.stride(), "an offset serves keys and values"
    assert key_cache.stride(3) == 1, "a head's numbers lie side by side"
    if key_scales is None or value_scales is None:
        assert key_cache.dtype != torch.int8, "int8 needs scales"
        return (*key_cache.stride()[:3], 0, 0, 0)
    assert key_scales.stride() == value_scales.stride(), "an offset serves scales of keys and values"
    return (*key_cache.stride()[:3], *key_scales.stride())


def padded(head_dim: int) -> int:
    """Width of a tile that holds a head."""
    width: int = max(32, triton.next_power_of_2(head_dim))
    return width


STRIDE_NAMES = (
    "block_stride",
    "token_stride",
    "head_stride",
    "scale_block_stride",
    "scale_token_stride",
    "scale_head_stride",
)
"""What `cache_strides` gives, as the kernels call it."""


def cache_formats(arch: int, head_dim: int) -> Iterator[tuple[str, str, str]]:
    """Types of activations and of the cache that a kernel is compiled for: (activation, cache, the cache's name).

    With a cache of bytes, kernels for both types of activations compute in float16; once for float16 is enough.
    """
    e4m3 = "*fp8e4nv" if arch >= _FIRST_ARCH_WITH_E4M3 else "*u8"
    for activation in ("fp16", "bf16"):
        yield activation, f"*{activation}", activation
        if activation == "bf16" or head_dim == 128:
            yield activation, e4m3, "e4m3"
            yield activation, "*i8", "int8"


def cache_types(activation: str, cache: str) -> dict[str, str]:
    """Types of the parameters that both kernels begin with."""
    scales = dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    return {"q": f"*{activation}", "key_cache": cache, "value_cache": cache, **scales, "block_table": "*i32"}


ALIGNED = ("q", "key_cache", "value_cache", "key_scales", "value_scales", "q_stride", *STRIDE_NAMES[:3])
"""Of those and the strides: divisible by 16, as a head size is, and strides that are multiples of it.

Tables of sequences may begin at any of them.
"""
