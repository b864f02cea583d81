"""Causal attention of prompt chunks over the paged KV cache.

Source: FlashAttention-2 and -3 (Dao; Shah et al.): tiles of rows over tiles of keys with an online softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.paged_tiles import (
    ALIGNED,
    HEAD_DIMS,
    LOG2_E,
    LOWEST,
    STRIDE_NAMES,
    Tile,
    as_queries,
    at_head,
    attend_tile,
    blocks_of,
    cache_formats,
    cache_strides,
    cache_types,
    normalised,
    padded,
    places_of,
    stored_cache,
)

# Tiles by bytes of a number in the cache and width of a head's tile. On sm_90 two groups of four warps have
# 64 rows each (WGMMA), and as many keys as registers allow: what goes on beside the products is paid once a tile.
_TILES: dict[int, dict[tuple[int, int], Tile]] = {
    80: {
        (1, 32): Tile(128, 64, 8, 3),
        (1, 64): Tile(128, 64, 8, 3),
        (1, 128): Tile(128, 64, 8, 3),
        (1, 256): Tile(64, 16, 4, 2),
        (2, 32): Tile(128, 64, 4, 3),
        (2, 64): Tile(128, 64, 4, 3),
        (2, 128): Tile(128, 64, 8, 3),
        (2, 256): Tile(64, 32, 4, 2),
    },
    90: {
        (1, 32): Tile(128, 128, 8, 3),
        (1, 64): Tile(128, 128, 8, 3),
        (1, 128): Tile(128, 128, 8, 2),
        (1, 256): Tile(128, 32, 8, 2),
        (2, 32): Tile(128, 128, 8, 3),
        (2, 64): Tile(128, 128, 8, 3),
        (2, 128): Tile(128, 128, 8, 2),
        (2, 256): Tile(128, 64, 8, 2),
    },
}
_TILES[89] = _TILES[80]
_PLAIN_TILE = Tile(32, 32, 4, 2)
"""Of float32, which runs on no tensor cores."""


@triton.jit
def _over_tiles(
    state, q, caches, scales, table, position, range_, bounds, scale, window, strides,
    shape: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Tiles of a range of tokens; the state carries the next tile's blocks, so that its loads wait for no table."""
    acc, largest, total, blocks = state
    for first in tl.range(range_[0], range_[1], BLOCK_N):
        at = first + tl.arange(0, BLOCK_N)
        next_blocks = blocks_of(table, first + BLOCK_N, bounds[1], BLOCK_N, shape[2])
        places = places_of(first, BLOCK_N, shape[2])
        inside = None
        seen = None
        if MASKED:
            inside = (at >= bounds[0]) & (at < bounds[1])
            seen = at[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
        acc, largest, total = attend_tile(
            (acc, largest, total), q, caches, scales, blocks, places, inside, seen, scale, strides, shape
        )
        blocks = next_blocks
    return acc, largest, total, blocks


@triton.jit
def _rows_of(
    first_row, start, query_len, kv_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows of the queries that a tile's rows are, columns of their heads, and which of them there are."""
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    d = tl.arange(0, BLOCK_D)
    rows = (start + token).to(tl.int64)[:, None]
    columns = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + d[None, :]
    return rows, columns, (token < query_len)[:, None] & (d < HEAD_DIM)[None, :]


@triton.jit(
    do_not_specialize=["window", "table_stride", *STRIDE_NAMES[3:]],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens"],
)
def _prefill_kernel(
    q, key_cache, value_cache, key_scales, value_scales, block_table, query_start, seq_lens, out,
    scale, window, q_stride, out_stride, table_stride,
    block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride, scale_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(query_start + sequence)
    query_len = tl.load(query_start + sequence + 1) - start
    # The last rows have the most to read: they go first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_row >= query_len * GROUP:
        return
    context = tl.load(seq_lens + sequence) - query_len
    rows, columns, live = _rows_of(first_row, start, query_len, kv_head, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M)
    position = context + (first_row + tl.arange(0, BLOCK_M)) // GROUP
    queries = as_queries(tl.load(q + rows * q_stride + columns, mask=live, other=0.0), key_cache)

    lowest_position = context + first_row // GROUP
    highest_position = context + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    end = highest_position + 1
    full_end = (lowest_position + 1) // BLOCK_N * BLOCK_N
    lowest = 0
    begin = 0
    full_begin = 0
    if WINDOWED:
        lowest = tl.maximum(lowest_position - window + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.maximum(highest_position - window + BLOCK_N, 0) // BLOCK_N * BLOCK_N, full_end)
    table = block_table + sequence.to(tl.int64) * table_stride
    caches = at_head(key_cache, value_cache, kv_head, head_stride)
    scales = None
    if key_scales is not None:
        scales = at_head(key_scales, value_scales, kv_head, scale_head_stride)
    strides = (block_stride, token_stride, scale_block_stride, scale_token_stride)
    shape: tl.constexpr = (HEAD_DIM, BLOCK_D, BLOCK_SIZE)
    bounds = (lowest, end)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    state = (sums, largest, total, blocks_of(table, begin, end, BLOCK_N, BLOCK_SIZE))
    if WINDOWED:
        state = _over_tiles(
            state, queries, caches, scales, table, position, (begin, full_begin), bounds, scale, window, strides,
            shape, BLOCK_N, True, True,
        )  # fmt: skip
    state = _over_tiles(
        state, queries, caches, scales, table, position, (full_begin, full_end), bounds, scale, window, strides,
        shape, BLOCK_N, False, False,
    )  # fmt: skip
    state = _over_tiles(
        state, queries, caches, scales, table, position, (full_end, end), bounds, scale, window, strides,
        shape, BLOCK_N, True, WINDOWED,
    )  # fmt: skip
    # Nobody knows that a second look finds the same: addresses are computed anew, and took no registers in the loops.
    again = first_row + tl.load(query_start + sequence, volatile=True) - start
    rows, columns, live = _rows_of(again, start, query_len, kv_head, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M)
    result = normalised(state[0], state[2], scales)
    tl.store(out + rows * out_stride + columns, result.to(out.dtype.element_ty), mask=live)


def attention_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    max_query_len: int,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    arch: int = 80,
) -> None:
    """Attention of each sequence's newest tokens, whose keys and values are in the cache already.

    A row's result depends on its sequence and position alone, bit for bit: not on the chunk it comes in.

    Args:
        q: (M, num_heads, head_dim), any row stride; a kv head's query heads are neighbours.
        key_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides but 1 of the last; of q's type,
            float8_e4m3fn or int8.
        value_cache: Like `key_cache`, with the same strides.
        block_table: (S, max_blocks), int32.
        query_start: (S + 1,), int32: rows of sequence s are [query_start[s], query_start[s + 1]). Rows before the
            first or after the last are left alone.
        seq_lens: (S,), int32, tokens with the new ones: row i of its sequence is at seq_len - query_len + i.
        out: Like `q`. Mutated.
        scale: Positive; scores are multiplied by it.
        window: A token sees so many, itself included; None: all before it.
        max_query_len: At least the largest query_len; decides about the grid only.
        key_scales: (num_blocks, block_size, num_kv_heads), float32, any strides; with int8 only.
        value_scales: Like `key_scales`, with the same strides.
        arch: Whose tiles to take, one of `ARCHITECTURES`.
    """
    head_dim, num_kv_heads, block_size = q.shape[2], key_cache.shape[2], key_cache.shape[1]
    group = q.shape[1] // num_kv_heads
    assert q.stride(1) == out.stride(1) == head_dim, "heads of a row lie side by side"
    strides = cache_strides(key_cache, value_cache, key_scales, value_scales)
    tile = _PLAIN_TILE if key_cache.itemsize == 4 else _TILES[arch][key_cache.itemsize, padded(head_dim)]
    grid = (triton.cdiv(max_query_len * group, tile.block_m), num_kv_heads, len(seq_lens))
    if grid[0] == 0 or grid[2] == 0:
        return
    _prefill_kernel[grid](
        q, stored_cache(key_cache, arch), stored_cache(value_cache, arch), key_scales, value_scales,
        block_table, query_start, seq_lens, out, scale * LOG2_E, window or 0,
        q.stride(0), out.stride(0), block_table.stride(0), *strides,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, WINDOWED=window is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The kernel as it is launched on an architecture."""
    for head_dim in HEAD_DIMS:
        for activation, cache, cache_name in cache_formats(arch, head_dim):
            name = f"attention_prefill/{activation}/kv-{cache_name}/d{head_dim}"
            yield _case(name, arch, head_dim, activation, cache)
            if activation == "bf16" and head_dim in {64, 128, 256}:
                yield _case(f"{name}/window", arch, head_dim, activation, cache, windowed=True)


def _case(name: str, arch: int, head_dim: int, activation: str, cache: str, *, windowed: bool = False) -> CompileCase:
    tile = _TILES[arch][2 if cache == f"*{activation}" else 1, padded(head_dim)]
    constexprs = {
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "WINDOWED": windowed,
    }
    absent = {} if cache == "*i8" else {"key_scales": None, "value_scales": None}
    types = {
        **cache_types(activation, cache),
        "query_start": "*i32",
        "seq_lens": "*i32",
        "out": f"*{activation}",
        "scale": "fp32",
        **dict.fromkeys(("window", "q_stride", "out_stride", "table_stride", *STRIDE_NAMES), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=_prefill_kernel,
        arch=arch,
        signature=types | dict.fromkeys([*absent, *constexprs], "constexpr"),
        constexprs=constexprs | absent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(n for n in (*ALIGNED, "out", "out_stride") if n not in absent),
        # Around the loops, not in them: with a window there are three of them, and a head of 256 fills the registers.
        max_spill_bytes=64 if windowed or head_dim == 256 else 0,
        expects=("HGMMA", "LDGSTS") if arch == 90 else ("HMMA", "LDGSTS"),
    )
