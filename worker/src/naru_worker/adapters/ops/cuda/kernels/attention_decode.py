"""Attention of generated tokens over the paged KV cache: the cache is cut into splits that are read side by side.

Source: Flash-Decoding (Dao et al.); rows packed by the query heads of a kv head, as FlashInfer does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.paged_tiles import (
    HEAD_DIMS,
    LOG2_E,
    LOWEST,
    STRIDE_NAMES,
    Tile,
    as_queries,
    attend_tile,
    blocks_of,
    places_of,
    cache_formats,
    cache_strides,
    normalised,
    padded,
    stored_cache,
)

_TAIL = 8
"""Numbers after a partial's sums: its largest score and its sum of weights; eight keep rows on whole sectors."""
_MERGED_AT_ONCE = 16
SPLIT = 256


def _tile(arch: int, cache_bytes: int, block_d: int, rows: int) -> Tile:
    return Tile(max(16, triton.next_power_of_2(rows)), 64, 4, 3)


@triton.jit(do_not_specialize=["window", "table_stride", "num_splits", *STRIDE_NAMES[3:]])
def _decode_kernel(
    q, key_cache, value_cache, key_scales, value_scales, block_table, seq_lens, out, partials,
    scale, window, num_splits, q_stride, out_stride, table_stride,
    block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride, scale_head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: their keys lie side by side in memory.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    first_position = length - ROWS
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(first_position - window + 1, 0)
    begin = (lowest // SPLIT + split) * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if partials is not None:
        if begin >= end:
            return
    begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    position = first_position + token
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    live = row < ROWS * GROUP
    stored = live[:, None] & (d < HEAD_DIM)[None, :]
    rows = sequence.to(tl.int64) * ROWS + token
    columns = head[:, None] * HEAD_DIM + d[None, :]
    queries = as_queries(tl.load(q + rows[:, None] * q_stride + columns, mask=stored, other=0.0), key_cache)

    table = block_table + sequence.to(tl.int64) * table_stride
    at_head = kv_head.to(tl.int64)
    caches = (key_cache + at_head * head_stride, value_cache + at_head * head_stride)
    scales = None
    if key_scales is not None:
        scales = (key_scales + at_head * scale_head_stride, value_scales + at_head * scale_head_stride)
    strides = (block_stride, token_stride, scale_block_stride, scale_token_stride)
    shape: tl.constexpr = (HEAD_DIM, BLOCK_D, BLOCK_SIZE)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    blocks = blocks_of(table, begin, end, BLOCK_N, BLOCK_SIZE)
    for first in tl.range(begin, end, BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        # A tile ahead: loads of keys and values wait for no table.
        next_blocks = blocks_of(table, first + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)
        places = places_of(first, BLOCK_N, BLOCK_SIZE)
        inside = (at >= lowest) & (at < end)
        seen = (at[None, :] <= position[:, None]) & inside[None, :]
        if WINDOWED:
            seen = seen & (at[None, :] > position[:, None] - window)
        sums, largest, total = attend_tile(
            (sums, largest, total), queries, caches, scales, blocks, places, inside, seen, scale, strides, shape
        )
        blocks = next_blocks
    if partials is None:
        result = normalised(sums, total, scales).to(out.dtype.element_ty)
        tl.store(out + rows[:, None] * out_stride + columns, result, mask=stored)
    else:
        num_heads = tl.num_programs(0) * GROUP
        partial = partials + ((rows * num_heads + head) * num_splits + split) * (HEAD_DIM + TAIL)
        tl.store(partial[:, None] + d[None, :], sums, mask=stored)
        tl.store(partial + HEAD_DIM, largest, mask=live)
        tl.store(partial + HEAD_DIM + 1, total, mask=live)


@triton.jit(do_not_specialize=["window", "num_splits"])
def _merge_kernel(
    partials, seq_lens, out, scales, window, num_splits, out_stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    AT_ONCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(seq_lens + row // ROWS)
    live_splits = tl.cdiv(length, SPLIT)
    if WINDOWED:
        live_splits -= tl.maximum(length - ROWS - window + 1, 0) // SPLIT
    d = tl.arange(0, BLOCK_D)
    at_row = row.to(tl.int64)
    base = partials + (at_row * tl.num_programs(0) + head) * num_splits * (HEAD_DIM + TAIL)
    sums = tl.zeros([1, BLOCK_D], tl.float32)
    largest = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in tl.range(0, live_splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        there = split < live_splits
        partial = base + split.to(tl.int64) * (HEAD_DIM + TAIL)
        split_largest = tl.load(partial + HEAD_DIM, mask=there, other=LOWEST)
        split_total = tl.load(partial + HEAD_DIM + 1, mask=there, other=0.0)
        split_sums = tl.load(partial[:, None] + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(split_largest, 0))
        weight = tl.exp2(split_largest - new_largest)
        shrink = tl.exp2(largest - new_largest)
        sums = tl.fma(sums, shrink[:, None], tl.sum(split_sums * weight[:, None], 0)[None, :])
        total = tl.fma(total, shrink, tl.sum(split_total * weight, 0))
        largest = new_largest
    result = normalised(sums, total, scales).to(out.dtype.element_ty)
    columns = head * HEAD_DIM + d[None, :]
    tl.store(out + at_row * out_stride + columns, result, mask=(d < HEAD_DIM)[None, :])


def split_tokens(head_dim: int, cache_bytes: int) -> int:
    """Tokens of a split."""
    return SPLIT


def split_count(longest: int, split: int, *, window: int | None = None, rows_per_seq: int = 1) -> int:
    """Splits that sequences of up to `longest` tokens need: the `num_splits` of a launch."""
    reached = longest if window is None else min(longest, window + rows_per_seq - 1)
    return (
        triton.cdiv(longest, split)
        if reached == longest
        else min(triton.cdiv(longest, split), triton.cdiv(reached - 1, split) + 1)
    )


def decode_partials_shape(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> tuple[int, ...]:
    """Shape."""
    return (num_rows, num_heads, num_splits, head_dim + _TAIL)


def attention_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    partials: Tensor | None,
    *,
    scale: float,
    window: int | None,
    num_splits: int,
    rows_per_seq: int = 1,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    arch: int = 80,
) -> None:
    """Doc."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    strides = cache_strides(key_cache, value_cache, key_scales, value_scales)
    block_d = padded(head_dim)
    tile = _tile(arch, key_cache.itemsize, block_d, rows_per_seq * group)
    split = split_tokens(head_dim, key_cache.itemsize)
    parts = partials if num_splits > 1 else None
    _decode_kernel[(num_kv_heads, num_splits, len(seq_lens))](
        q, stored_cache(key_cache, arch), stored_cache(value_cache, arch), key_scales, value_scales,
        block_table, seq_lens, out, parts, scale * LOG2_E, window or 0, num_splits,
        q.stride(0), out.stride(0), block_table.stride(0), *strides,
        GROUP=group, ROWS=rows_per_seq, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SPLIT=split, TAIL=_TAIL, WINDOWED=window is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if parts is not None:
        _merge_kernel[(num_heads, len(seq_lens) * rows_per_seq)](
            parts, seq_lens, out, key_scales, window or 0, num_splits, out.stride(0),
            ROWS=rows_per_seq, HEAD_DIM=head_dim, BLOCK_D=block_d, SPLIT=split, TAIL=_TAIL, AT_ONCE=_MERGED_AT_ONCE,
            WINDOWED=window is not None, num_warps=4,
        )  # fmt: skip
