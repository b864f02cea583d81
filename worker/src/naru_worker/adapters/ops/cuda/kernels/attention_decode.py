"""Attention of generated tokens over the paged KV cache: the cache is cut into splits that are read side by side.

Source: Flash-Decoding (Dao et al.); rows packed by the query heads of a kv head, as FlashInfer does.
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

_TAIL = 8
"""Numbers after a partial's sums: its largest score and its sum of weights; eight keep rows on whole sectors."""
_MERGED_AT_ONCE = 16
"""Splits that a program of the merge takes at a time."""
_MERGE_WARPS = 4
_MERGE_STAGES = 2
_MAX_TILE_ROWS = 128
"""Most rows of a tile."""
_PACKED_ROWS = 64
"""Of a sequence and kv head, where it has several tokens: tokens times query heads."""

# (tokens of a tile, stages) by bytes of a number in the cache and width of a head's tile. Keys and values of a tile are
# 32 KiB on sm_90, where two programs share a multiprocessor, and 16 KiB elsewhere, where three do: more than twice the
# bytes that must be on their way to keep the memory busy.
_TILES: dict[int, dict[tuple[int, int], tuple[int, int]]] = {
    80: {
        (1, 32): (128, 3), (1, 64): (128, 3), (1, 128): (64, 3), (1, 256): (32, 3),
        (2, 32): (128, 3), (2, 64): (64, 3), (2, 128): (32, 3), (2, 256): (32, 2),
        (4, 32): (64, 2), (4, 64): (32, 2), (4, 128): (32, 2), (4, 256): (32, 2),
    },
    90: {
        (1, 32): (128, 3), (1, 64): (128, 3), (1, 128): (128, 3), (1, 256): (32, 3),
        (2, 32): (128, 3), (2, 64): (128, 3), (2, 128): (64, 3), (2, 256): (32, 3),
        (4, 32): (64, 2), (4, 64): (32, 2), (4, 128): (32, 2), (4, 256): (32, 2),
    },
}  # fmt: skip
_TILES[89] = _TILES[80]


def packed_tokens(group: int) -> int:
    """Most tokens of a sequence that are computed together: its cache is read once for all of them.

    `group`: query heads of a kv head.
    """
    return max(1, _PACKED_ROWS // group)


def tile_tokens(count: int, group: int) -> int:
    """Tokens that the tile of `count` tokens has places for: launches with as many need no other code."""
    return int(_block_m(count * group) // group)


def _block_m(rows: int) -> int:
    return max(16, int(triton.next_power_of_2(rows)))


def _tile(arch: int, cache_bytes: int, block_d: int, rows: int) -> Tile:
    """The tile of a launch. What a row comes to must not depend on the number of rows: only block_m and warps do."""
    assert rows <= _MAX_TILE_ROWS, "so many query heads share no kv head"
    block_n, num_stages = _TILES[arch][cache_bytes, block_d]
    block_m = _block_m(rows)
    return Tile(block_m, block_n, 8 if block_m * block_d > 128 * 128 else 4, num_stages)


@triton.jit
def _rows_of(run, run_start, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A run's rows and heads as they lie in the tile, which of them there are, and where it begins and ends.

    Asked for again behind the loop: numbers that are kept in registers all along spill.
    """
    first_row = tl.load(run_start + run, volatile=True)
    end_row = tl.load(run_start + run + 1, volatile=True)
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    rows = first_row.to(tl.int64) + token
    return rows, kv_head * GROUP + row % GROUP, first_row + token < end_row, first_row, end_row


@triton.jit(
    do_not_specialize=["window", "table_stride", "num_splits", *STRIDE_NAMES[3:]],
    do_not_specialize_on_alignment=["block_table", "run_lines", "run_start", "row_lens"],
)
def _decode_kernel(
    q, key_cache, value_cache, key_scales, value_scales, block_table, run_lines, run_start, row_lens, out, partials,
    scale, window, num_splits, q_stride, out_stride, table_stride,
    block_stride, token_stride, head_stride, scale_block_stride, scale_token_stride, scale_head_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    # Heads vary fastest: their keys lie side by side in memory.
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    run = tl.program_id(2)
    rows, head, live, first_row, end_row = _rows_of(run, run_start, kv_head, GROUP, BLOCK_M)
    # Without rows there is nothing to look at: another's will do.
    length = tl.load(row_lens + tl.maximum(end_row - 1, 0))
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(length - (end_row - first_row) + 1 - window, 0)
    begin = (lowest // SPLIT + split) * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if end_row == first_row or (partials is not None and begin >= end):
        return
    begin = tl.maximum(begin, lowest // BLOCK_N * BLOCK_N)
    position = length - (end_row - first_row) + tl.arange(0, BLOCK_M) // GROUP
    d = tl.arange(0, BLOCK_D)
    stored = live[:, None] & (d < HEAD_DIM)[None, :]
    columns = head[:, None] * HEAD_DIM + d[None, :]
    queries = as_queries(tl.load(q + rows[:, None] * q_stride + columns, mask=stored, other=0.0), key_cache)

    table = block_table + tl.load(run_lines + run).to(tl.int64) * table_stride
    caches = at_head(key_cache, value_cache, kv_head, head_stride)
    scales = None
    if key_scales is not None:
        scales = at_head(key_scales, value_scales, kv_head, scale_head_stride)
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
    rows, head, live, first_row, end_row = _rows_of(run, run_start, kv_head, GROUP, BLOCK_M)
    if partials is None:
        result = normalised(sums, total, scales).to(out.dtype.element_ty)
        stored = live[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(out + rows[:, None] * out_stride + head[:, None] * HEAD_DIM + d[None, :], result, mask=stored)
    else:
        num_heads = tl.num_programs(0) * GROUP
        place = split
        if WINDOWED:
            # Of the splits that a row needs itself: it may begin later than the first one of its run.
            place += lowest // SPLIT - tl.maximum(position + 1 - window, 0) // SPLIT
            live = live & (place >= 0)
        partial = partials + ((rows * num_heads + head) * num_splits + place) * (HEAD_DIM + TAIL)
        _store_partial(partial, (sums, largest, total), live, HEAD_DIM, BLOCK_D)


@triton.jit
def _store_partial(partial, state, live, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """What the rows have of a split, each to its place: the sums, then the largest score and the weights' sum."""
    d = tl.arange(0, BLOCK_D)
    tl.store(partial[:, None] + d[None, :], state[0], mask=live[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(partial + HEAD_DIM, state[1], mask=live)
    tl.store(partial + HEAD_DIM + 1, state[2], mask=live)


@triton.jit(do_not_specialize=["window", "num_splits"], do_not_specialize_on_alignment=["row_lens"])
def _merge_kernel(
    partials, row_lens, out, window, num_splits, out_stride, scales,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, TAIL: tl.constexpr,
    AT_ONCE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    length = tl.load(row_lens + row)
    live_splits = tl.cdiv(length, SPLIT)
    if WINDOWED:
        live_splits -= tl.maximum(length - window, 0) // SPLIT
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
    """Tokens of a split, by bytes of a number in the cache: fixed, or a token's numbers would depend on its batch.

    A split is some 128 or 256 KiB of a head's keys and values: beside it a partial result is small.
    """
    return 512 if 2 * padded(head_dim) * cache_bytes <= 512 else 256


def split_count(longest: int, split: int, *, window: int | None = None, most_rows: int = 1) -> int:
    """Splits of `split` tokens that rows which see up to `longest` tokens need: the `num_splits` of a launch."""
    count = max(1, -(-longest // split))
    if window is None:
        return count
    return min(count, -(-(window + most_rows - 2) // split) + 1)


def decode_partials_shape(num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> tuple[int, ...]:
    """Shape of the float32 buffer that launches with up to so many rows and splits need; its content never matters."""
    return (num_rows, num_heads, num_splits, head_dim + _TAIL)


def attention_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    run_lines: Tensor,
    run_start: Tensor,
    row_lens: Tensor,
    out: Tensor,
    partials: Tensor | None,
    *,
    scale: float,
    window: int | None,
    num_splits: int,
    most_rows: int = 1,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    arch: int = 80,
) -> None:
    """Attention of each sequence's newest tokens, whose keys and values are in the cache already.

    A run is one such token, or some that follow one another (the last one of which may be a guess): its cache is read
    once. A row's result depends on its sequence and position alone, bit for bit.

    Args:
        q: (M, num_heads, head_dim), any row stride; a kv head's query heads are neighbours.
        key_cache: (num_blocks, block_size, num_kv_heads, head_dim), any strides but 1 of the last; of q's type,
            float8_e4m3fn or int8.
        value_cache: Like `key_cache`, with the same strides.
        block_table: (lines, max_blocks), int32.
        run_lines: (S,), int32, the line of each run's sequence.
        run_start: (S + 1,), int32, first row of each run; last is M. Runs without rows pad a batch.
        row_lens: (M,), int32, tokens that each row sees, itself included: one more from row to row of a run. 0: none,
            and the row becomes zeros.
        out: Like `q`. Mutated.
        partials: Float32, contiguous, at least `decode_partials_shape`; None will do for one split. Mutated.
        scale: Positive; scores are multiplied by it.
        window: A token sees so many, itself included; None: all before it.
        num_splits: At least `split_count` of the longest row; decides about the grid only.
        most_rows: No run has more.
        key_scales: (num_blocks, block_size, num_kv_heads), float32, any strides; needed with int8.
        value_scales: Like `key_scales`, with the same strides.
        arch: Whose tiles to take, one of `ARCHITECTURES`.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if num_rows == 0:
        return
    assert q.stride(1) == out.stride(1) == head_dim, "heads of a row lie side by side"
    strides = cache_strides(key_cache, value_cache, key_scales, value_scales)
    block_d = padded(head_dim)
    tile = _tile(arch, key_cache.itemsize, block_d, most_rows * group)
    split = split_tokens(head_dim, key_cache.itemsize)
    parts = partials if num_splits > 1 else None
    assert parts is not None or num_splits == 1, "splits leave partial results"
    assert parts is None or parts.numel() >= num_rows * num_heads * num_splits * (head_dim + _TAIL)
    _decode_kernel[(num_kv_heads, num_splits, len(run_lines))](
        q, stored_cache(key_cache, arch), stored_cache(value_cache, arch), key_scales, value_scales,
        block_table, run_lines, run_start, row_lens, out, parts, scale * LOG2_E, window or 0, num_splits,
        q.stride(0), out.stride(0), block_table.stride(0), *strides,
        GROUP=group, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SPLIT=split, TAIL=_TAIL, WINDOWED=window is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if parts is not None:
        _merge_kernel[(num_heads, num_rows)](
            parts, row_lens, out, window or 0, num_splits, out.stride(0), key_scales,
            HEAD_DIM=head_dim, BLOCK_D=block_d, SPLIT=split, TAIL=_TAIL, AT_ONCE=_MERGED_AT_ONCE,
            WINDOWED=window is not None, num_warps=_MERGE_WARPS, num_stages=_MERGE_STAGES,
        )  # fmt: skip


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The kernels as they are launched on an architecture."""
    for head_dim in HEAD_DIMS:
        for activation, cache, cache_name in cache_formats(arch, head_dim):
            name = f"attention_decode/{activation}/kv-{cache_name}/d{head_dim}"
            yield _decode_case(name, arch, head_dim, activation, cache)
            if activation == "bf16" and head_dim in {64, 128, 256}:
                yield _decode_case(f"{name}/rows-4-of-8", arch, head_dim, activation, cache, rows=4, group=8)
        if head_dim == 128:
            name = f"attention_decode/bf16/kv-bf16/d{head_dim}"
            yield _decode_case(f"{name}/whole", arch, head_dim, "bf16", "*bf16", is_split=False)
            yield _decode_case(f"{name}/window", arch, head_dim, "bf16", "*bf16", windowed=True)
            yield _decode_case(f"{name}/rows-8-of-8", arch, head_dim, "bf16", "*bf16", rows=8, group=8)
        yield _merge_case(arch, head_dim)


def _decode_case(
    name: str,
    arch: int,
    head_dim: int,
    activation: str,
    cache: str,
    *,
    rows: int = 1,
    group: int = 4,
    is_split: bool = True,
    windowed: bool = False,
) -> CompileCase:
    cache_bytes = 2 if cache == f"*{activation}" else 1
    tile = _tile(arch, cache_bytes, padded(head_dim), rows * group)
    constexprs = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_SIZE": 16,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SPLIT": split_tokens(head_dim, cache_bytes),
        "TAIL": _TAIL,
        "WINDOWED": windowed,
    }
    absent = {} if is_split else {"partials": None}
    if cache != "*i8":
        absent |= {"key_scales": None, "value_scales": None}
    types = {
        **cache_types(activation, cache),
        **dict.fromkeys(("run_lines", "run_start", "row_lens"), "*i32"),
        "out": f"*{activation}",
        "partials": "*fp32",
        "scale": "fp32",
        **dict.fromkeys(("window", "num_splits", "q_stride", "out_stride", "table_stride", *STRIDE_NAMES), "i32"),
    }
    return CompileCase(
        name=name,
        kernel=_decode_kernel,
        arch=arch,
        signature=types | dict.fromkeys([*absent, *constexprs], "constexpr"),
        constexprs=constexprs | absent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(n for n in (*ALIGNED, "out", "partials", "out_stride") if n not in absent),
        expects=("LDGSTS",),
    )


def _merge_case(arch: int, head_dim: int) -> CompileCase:
    constexprs = {
        "scales": None,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "SPLIT": split_tokens(head_dim, 2),
        "TAIL": _TAIL,
        "AT_ONCE": _MERGED_AT_ONCE,
        "WINDOWED": False,
    }
    types = {"partials": "*fp32", "row_lens": "*i32", "out": "*bf16", "window": "i32"}
    return CompileCase(
        name=f"attention_merge/bf16/d{head_dim}",
        kernel=_merge_kernel,
        arch=arch,
        signature=types | {"num_splits": "i32", "out_stride": "i32"} | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=_MERGE_WARPS,
        num_stages=_MERGE_STAGES,
        aligned=("partials", "out", "out_stride"),
    )
