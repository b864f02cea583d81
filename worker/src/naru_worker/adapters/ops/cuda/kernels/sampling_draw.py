"""The token of each row: its target, its best one, or the one that a random number points at.

A row's draw is that of `sampling_ref`: tokens stand in a line, the best first, each as wide as its probability, and the
token is taken that lies at the random number's place. No sort is needed for it: the place is found by a search over the
bits of logits, eight pivots at a time, with the mass of all tokens above each.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.sampling_levels import (
    CANDIDATES,
    FARTHEST,
    LEVELS,
    at_level,
    chosen_level,
    distances,
    sums_of,
)
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import (
    CHUNK,
    IS_DRAWN,
    IS_IMPOSSIBLE,
    LAST_ID,
    NONE,
    from_order,
    order,
    padded_chunks,
    uniform,
)
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingTensors

PIVOTS = 8
_NUM_WARPS = 8


@triton.jit
def _above(values, count, top, temperature, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """(PIVOTS,) how many of `count` values are above each pivot, and their mass."""
    counts, masses = tl.full((PIVOTS,), 0, tl.int32), tl.full((PIVOTS,), 0.0, tl.float64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < count, other=NONE)
        weight = tl.exp((x - top) / temperature)
        is_above = order(x)[None, :] > pivots.to(tl.int32)[:, None]
        counts += tl.sum(is_above.to(tl.int32), 1)
        masses += tl.sum(tl.where(is_above, weight[None, :], 0.0), 1).to(tl.float64)
    return counts, masses


@triton.jit
def _threshold(
    values, count, top, temperature, floor, count_goal, mass_goal, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The least value above which there are fewer than `count_goal` values, or less mass than `mass_goal`.

    Returns its order, the count and mass above it, and how many values are equal to it: 0 where there is no such value,
    and then the order is that of the least one above `floor`.
    """
    low, high = floor, order(top).to(tl.int64)
    num_above, mass_above, num_from = 0, tl.zeros((), tl.float64), count
    index = tl.arange(0, PIVOTS)
    # Values in (low, high] are undecided; with a single one there is nothing more to find out about their order.
    while (high - low > 1) & (num_from - num_above > 1):
        pivots = low + 1 + ((high - low - 1) * (2 * index + 1)) // (2 * PIVOTS)
        counts, masses = _above(values, count, top, temperature, pivots, BLOCK, PIVOTS)
        num_low = tl.sum(((counts >= count_goal) & (masses >= mass_goal)).to(tl.int32))
        if num_low > 0:
            low = tl.sum(tl.where(index == num_low - 1, pivots, 0))
            num_from = tl.sum(tl.where(index == num_low - 1, counts, 0))
        if num_low < PIVOTS:
            high = tl.sum(tl.where(index == num_low, pivots, 0))
            num_above = tl.sum(tl.where(index == num_low, counts, 0))
            mass_above = tl.sum(tl.where(index == num_low, masses, 0.0))
    greatest, least = tl.full((BLOCK,), -(2**31), tl.int32), tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = order(tl.load(values + at, mask=at < count, other=NONE))
        greatest = tl.maximum(greatest, tl.where(key <= high, key, -(2**31)))
        least = tl.minimum(least, tl.where(key > high, key, 2**31 - 1))
    ties = num_from - num_above
    return tl.where(ties > 0, tl.max(greatest), tl.min(least)), num_above, mass_above, ties


@triton.jit
def _place_of(values, count, key, num_before, BLOCK: tl.constexpr):
    """Where the value of an order stands that has `num_before` equal ones before it, or else the last one."""
    place, run = -1, 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_equal = order(tl.load(values + at, mask=at < count, other=NONE)) == key
        before = run + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        place = tl.maximum(place, tl.max(tl.where(is_equal & (before <= num_before), at, -1)))
        run += tl.sum(is_equal.to(tl.int32))
    return place


@triton.jit
def _drawn(
    values,
    count,
    top,
    temperature,
    farthest,
    num_tokens,
    total,
    kept,
    top_k,
    top_p,
    chance,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Where the drawn value stands.

    Three searches of one kind: the mass of the best `top_k`, the mass of those of them that `top_p` keeps, and the
    draw. The tokens that a cut leaves are the first in the order, so the cut that leaves the least mass is the one that
    counts.
    """
    floor = order(top - (farthest * temperature * 1.001 + tl.abs(top) * 1e-6)).to(tl.int64) - 1
    kept = tl.minimum(kept, total)
    place = -1
    for stage in range(0, 3):
        is_needed = (stage == 2) | ((stage == 1) & (top_p < 1.0))
        is_needed |= (stage == 0) & (top_k > 0) & (top_k < num_tokens)
        if is_needed:
            goal = tl.where(stage == 0, 0.0, tl.where(stage == 1, top_p.to(tl.float64) * total, chance * kept))
            # The draw takes the first token whose end lies beyond the goal, not at it.
            mass_goal = tl.where(stage == 2, goal * (1.0 + 4.5e-16) + 1e-300, goal)
            num_goal = tl.where(stage == 0, top_k, 0)
            key, num_above, mass_above, ties = _threshold(
                values, count, top, temperature, floor, num_goal, mass_goal, BLOCK, PIVOTS
            )
            weight = tl.exp((from_order(key) - top) / temperature).to(tl.float64)
            share = tl.minimum(tl.maximum((goal - mass_above) / tl.maximum(weight, 1e-60), 0.0), 1e9)
            whole = share.to(tl.int32)
            if stage == 0:
                total = mass_above + (top_k - num_above) * weight
                kept = tl.minimum(kept, total)
            elif stage == 1:
                num_kept = tl.minimum(tl.maximum(whole + (whole < share).to(tl.int32), 1), ties)
                kept = tl.minimum(kept, mass_above + num_kept * weight)
            else:
                place = _place_of(values, count, key, tl.where(ties > 0, whole, count), BLOCK)
    return place


@triton.jit
def _first_allowed(row, limit, mask_rows, mask_words, words_per_mask, banned_start, banned_ids, BLOCK: tl.constexpr):
    """What a row takes to which nothing is possible: the lowest id that is not banned; with a mask, one of the mask."""
    found, of_mask = tl.full((), LAST_ID, tl.int32), tl.full((), LAST_ID, tl.int32)
    mask_row = tl.full((), -1, tl.int32)
    if mask_words is not None:
        mask_row = tl.load(mask_rows + row)
    start, end, first = tl.load(banned_start + row), tl.load(banned_start + row + 1), 0
    while (first < limit) & (found == LAST_ID):
        at = first + tl.arange(0, BLOCK)
        allowed = at < limit
        if mask_words is not None:
            words = mask_words + tl.maximum(mask_row, 0).to(tl.int64) * words_per_mask
            word = tl.load(words + at // 32, mask=at < tl.where(mask_row >= 0, limit, 0), other=-1)
            allowed &= ((word >> (at % 32)) & 1) != 0
        of_mask = tl.minimum(of_mask, tl.min(tl.where(allowed, at, LAST_ID)))
        for i in range(start, end):
            allowed &= at != tl.load(banned_ids + i)
        found = tl.min(tl.where(allowed, at, LAST_ID))
        first += BLOCK
    of_mask = tl.where((mask_row >= 0) & (of_mask != LAST_ID), of_mask, 0)
    return tl.where(found != LAST_ID, found, of_mask)


@triton.jit(do_not_specialize=["chunks", "words_per_mask"])
def _draw_kernel(
    flags,
    target,
    temperature,
    top_k,
    top_p,
    seed,
    counter,
    best_values,
    best_ids,
    level_counts,
    level_masses,
    kept_masses,
    candidates,
    candidate_ids,
    work,
    work_stride,
    limit,
    chunks,
    mask_rows,
    mask_words,
    words_per_mask,
    banned_start,
    banned_ids,
    token_ids,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    flag, wanted = tl.load(flags + row), tl.load(target + row)
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(best_values + row * chunks + chunk, mask=chunk < chunks, other=NONE)
    ids = tl.load(best_ids + row * chunks + chunk, mask=chunk < chunks, other=LAST_ID)
    top = tl.max(tops)
    token = tl.min(tl.where(tops == top, ids, LAST_ID))
    if wanted >= 0:
        token = wanted
    elif (flag & IS_IMPOSSIBLE) != 0:
        token = tl.full((), -1, tl.int32)
    elif top == NONE:
        token = _first_allowed(row, limit, mask_rows, mask_words, words_per_mask, banned_start, banned_ids, CANDIDATES)
    elif level_counts is not None:
        if (flag & IS_DRAWN) != 0:
            counts, masses = sums_of(level_counts, level_masses, row, chunks, CHUNKS, LEVELS)
            kept = tl.load(kept_masses + row * chunks + chunk, mask=chunk < chunks, other=0.0)
            kept = tl.sum(kept.to(tl.float64))
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            seed_bits, counter_bits = tl.load(seed + row), tl.load(counter + row)
            level, suffices = chosen_level(counts, masses, kept, k, p, seed_bits, counter_bits, LEVELS, CANDIDATES)
            place = _drawn(
                tl.where(suffices, candidates + row * CANDIDATES, work + row * work_stride),
                tl.where(suffices, at_level(counts, level, LEVELS), limit),
                top,
                tl.load(temperature + row),
                tl.where(suffices, at_level(distances(LEVELS), level, LEVELS), FARTHEST),
                at_level(counts, LEVELS - 1, LEVELS),
                at_level(masses, LEVELS - 1, LEVELS),
                kept,
                k,
                p,
                uniform(seed_bits, counter_bits),
                CANDIDATES,
                PIVOTS,
            )
            token = place
            if suffices:
                token = tl.load(candidate_ids + row * CANDIDATES + place)
    tl.store(token_ids + row, token)


def choose(
    tensors: SamplingTensors,
    work: Tensor | None,
    vocab_limit: int,
    best_values: Tensor,
    best_ids: Tensor,
    levels: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None,
    token_ids: Tensor,
    *,
    has_masks: bool,
) -> None:
    """Fills the token of each row.

    Args:
        tensors: How to draw.
        work: (R, at least vocab_limit) float32, rows whose candidates do not suffice.
        vocab_limit: Ids from here on do not exist.
        best_values: (R, chunks) float32, of `sampling_best`.
        best_ids: (R, chunks) int32.
        levels: What `gather_candidates` filled; None: nothing is left to chance, and `work` is not needed.
        token_ids: (R,) int32. Mutated.
        has_masks: Whether any row may have a mask.
    """
    chunks = triton.cdiv(vocab_limit, CHUNK)
    _draw_kernel[(len(token_ids),)](
        tensors.flags,
        tensors.target,
        tensors.temperature,
        tensors.top_k,
        tensors.top_p,
        tensors.seed,
        tensors.counter,
        best_values,
        best_ids,
        *((None,) * 5 if levels is None else levels),
        work if levels is not None else None,
        0 if work is None else work.stride(0),
        vocab_limit,
        chunks,
        tensors.mask_rows if has_masks else None,
        tensors.mask_words if has_masks else None,
        tensors.mask_words.shape[1],
        tensors.banned_start,
        tensors.banned_ids,
        token_ids,
        CHUNKS=padded_chunks(chunks),
        LEVELS=LEVELS,
        CANDIDATES=CANDIDATES,
        PIVOTS=PIVOTS,
        num_warps=_NUM_WARPS,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Greedy rows alone and draws, with and without masks."""
    for has_draws in (False, True):
        for has_masks in (False, True):
            levels = {"level_counts": "*i32", "level_masses": "*fp32", "kept_masses": "*fp32"}
            levels |= {"candidates": "*fp32", "candidate_ids": "*i32", "work": "*fp32"}
            masks = {"mask_rows": "*i32", "mask_words": "*i32"}
            signature = {"flags": "*i32", "target": "*i32", "temperature": "*fp32", "top_k": "*i32"}
            signature |= {"top_p": "*fp32", "seed": "*i64", "counter": "*i64", "best_values": "*fp32"}
            signature |= {"best_ids": "*i32"} | levels | {"work_stride": "i32", "limit": "i32", "chunks": "i32"}
            signature |= masks | {"words_per_mask": "i32", "banned_start": "*i32", "banned_ids": "*i32"}
            signature |= {"token_ids": "*i32"}
            absent = set() if has_draws else set(levels)
            absent |= set() if has_masks else set(masks)
            signature |= dict.fromkeys(absent, "constexpr")
            sizes = {"CHUNKS": padded_chunks(1), "LEVELS": LEVELS, "CANDIDATES": CANDIDATES, "PIVOTS": PIVOTS}
            yield CompileCase(
                name=f"sampling_{'draw' if has_draws else 'greedy'}" + "/masks" * has_masks,
                kernel=_draw_kernel,
                arch=arch,
                signature=signature | dict.fromkeys(sizes, "constexpr"),
                constexprs=dict.fromkeys(absent) | sizes,
                num_warps=_NUM_WARPS,
                num_stages=3,
                aligned=(*[n for n, kind in signature.items() if kind.startswith("*")], "work_stride", "limit"),
            )
