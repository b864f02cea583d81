"""Finds the few tokens of a row among which chance decides: how many lie within some distances of the best, and who.

The tokens that top-k, top-p, min-p or the draw itself could end with nearly always are among the best two thousand.
They are moved together, so that the search for the thresholds goes over them alone; where they do not suffice (a flat
distribution), it goes over the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import (
    CHUNK,
    IS_DRAWN,
    IS_EDITED,
    NONE,
    clean,
    padded_chunks,
    uniform,
)
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingTensors

CANDIDATES = 2048
"""Room for candidates of a row."""
LEVELS = 8
"""Distances from the best token, in units of the temperature; the last one is that of all tokens that count."""
_NUM_WARPS_OF_LEVELS = 16
_NUM_WARPS_OF_GATHER = 8
_STEP = tl.constexpr(1.5)
FARTHEST = tl.constexpr(87.0)
"""Beyond it exp(-distance) is no normal float32; such a token is as good as impossible."""


@triton.jit
def distances(LEVELS: tl.constexpr):
    """(LEVELS,) float32."""
    level = tl.arange(0, LEVELS)
    return tl.where(level == LEVELS - 1, FARTHEST, (level + 1) * _STEP)


@triton.jit
def edited_or_raw(logits_row, work_row, is_edited, at, limit):
    """Clean logits at some places of a row."""
    raw = tl.load(logits_row + at, mask=at < tl.where(is_edited, 0, limit), other=NONE)
    edited = tl.load(work_row + at, mask=at < tl.where(is_edited, limit, 0), other=NONE)
    return clean(tl.where(is_edited, edited, raw.to(tl.float32)))


@triton.jit
def best_of(values, row, chunks, CHUNKS: tl.constexpr):
    """The largest of a row's chunks."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(values + row * chunks + chunk, mask=chunk < chunks, other=NONE))


@triton.jit
def sums_of(level_counts, level_masses, row, chunks, CHUNKS: tl.constexpr, LEVELS: tl.constexpr):
    """(LEVELS,) tokens of a row within each distance, and their mass."""
    chunk, level = tl.arange(0, CHUNKS), tl.arange(0, LEVELS)
    at = (row * chunks + chunk)[:, None] * LEVELS + level[None, :]
    inside = (chunk < chunks)[:, None] & (level < LEVELS)[None, :]
    counts = tl.sum(tl.load(level_counts + at, mask=inside, other=0), 0)
    masses = tl.sum(tl.load(level_masses + at, mask=inside, other=0.0).to(tl.float64), 0)
    return counts, masses


@triton.jit
def at_level(values, level, LEVELS: tl.constexpr):
    """One of (LEVELS,) numbers; 0 at level -1."""
    return tl.sum(tl.where(tl.arange(0, LEVELS) == level, values, 0))


@triton.jit
def chosen_level(
    counts, masses, kept_mass, top_k, top_p, seed, counter, LEVELS: tl.constexpr, CANDIDATES: tl.constexpr
):
    """The farthest level whose tokens there is room for, and whether all that is sought lies within it."""
    level = tl.sum((counts <= CANDIDATES).to(tl.int32)) - 1
    count, mass = at_level(counts, level, LEVELS), at_level(masses, level, LEVELS)
    total = at_level(masses, LEVELS - 1, LEVELS)
    goal = tl.minimum(total, kept_mass) * tl.where(top_p < 1.0, 1.0, uniform(seed, counter))
    goal = tl.minimum(goal, tl.where(top_p < 1.0, total * top_p.to(tl.float64), total))
    is_limited = (top_k > 0) & (top_k < at_level(counts, LEVELS - 1, LEVELS))
    holds_all = level == LEVELS - 1
    return level, holds_all | tl.where(is_limited, top_k <= count, goal < mass)


@triton.jit
def _levels_kernel(
    logits,
    logits_stride,
    work,
    work_stride,
    limit,
    flags,
    temperature,
    min_p,
    best_values,
    level_counts,
    level_masses,
    kept_masses,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flag, chunks = tl.load(flags + row), tl.num_programs(1)
    top = best_of(best_values, row, chunks, CHUNKS)
    if ((flag & IS_DRAWN) != 0) & (top > NONE):
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        is_edited = (flag & IS_EDITED) != 0
        x = edited_or_raw(logits + row * logits_stride, work + row * work_stride, is_edited, at, limit)
        e = (x - top) / tl.load(temperature + row)
        weight = tl.exp(e)
        is_within = e[None, :] >= -distances(LEVELS)[:, None]
        level, place = tl.arange(0, LEVELS), row * chunks + chunk
        tl.store(level_counts + place * LEVELS + level, tl.sum(is_within.to(tl.int32), 1))
        tl.store(level_masses + place * LEVELS + level, tl.sum(tl.where(is_within, weight[None, :], 0.0), 1))
        is_kept = (e >= -FARTHEST) & (weight >= tl.load(min_p + row))
        tl.store(kept_masses + place, tl.sum(tl.where(is_kept, weight, 0.0)))


@triton.jit
def _gather_kernel(
    logits,
    logits_stride,
    work,
    work_stride,
    limit,
    flags,
    temperature,
    top_k,
    top_p,
    seed,
    counter,
    best_values,
    level_counts,
    level_masses,
    kept_masses,
    candidates,
    candidate_ids,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flag, chunks = tl.load(flags + row), tl.num_programs(1)
    top = best_of(best_values, row, chunks, CHUNKS)
    if ((flag & IS_DRAWN) != 0) & (top > NONE):
        counts, masses = sums_of(level_counts, level_masses, row, chunks, CHUNKS, LEVELS)
        others = tl.arange(0, CHUNKS)
        kept = tl.load(kept_masses + row * chunks + others, mask=others < chunks, other=0.0)
        level, suffices = chosen_level(
            counts,
            masses,
            tl.sum(kept.to(tl.float64)),
            tl.load(top_k + row),
            tl.load(top_p + row),
            tl.load(seed + row),
            tl.load(counter + row),
            LEVELS,
            CANDIDATES,
        )
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        is_edited = (flag & IS_EDITED) != 0
        work_row = work + row * work_stride
        x = edited_or_raw(logits + row * logits_stride, work_row, is_edited, at, limit)
        if suffices:
            e = (x - top) / tl.load(temperature + row)
            is_within = e >= -at_level(distances(LEVELS), level, LEVELS)
            before = tl.load(level_counts + (row * chunks + others) * LEVELS + level, mask=others < chunk, other=0)
            to = row * CANDIDATES + tl.sum(before) + tl.cumsum(is_within.to(tl.int32), 0) - 1
            tl.store(candidates + to, x, mask=is_within)
            tl.store(candidate_ids + to, at, mask=is_within)
        else:
            tl.store(work_row + at, x, mask=at < limit)


def gather_candidates(
    logits: Tensor,
    tensors: SamplingTensors,
    work: Tensor,
    vocab_limit: int,
    best_values: Tensor,
    level_counts: Tensor,
    level_masses: Tensor,
    kept_masses: Tensor,
    candidates: Tensor,
    candidate_ids: Tensor,
) -> None:
    """Moves together what may decide about the draws of a batch's rows.

    Args:
        logits: (R, vocab), any float type, last stride 1.
        tensors: How to draw.
        work: (R, at least vocab_limit) float32 with the edited rows. Mutated: rows whose candidates do not suffice
            become what they are after edits, without NaN.
        vocab_limit: Ids from here on do not exist.
        best_values: (R, chunks) float32, of `sampling_best`.
        level_counts: (R, chunks, LEVELS) int32. Mutated, as all that follow.
        level_masses: (R, chunks, LEVELS) float32, of exp((logit - best) / temperature).
        kept_masses: (R, chunks) float32, of tokens that min-p keeps.
        candidates: (R, CANDIDATES) float32, logits.
        candidate_ids: (R, CANDIDATES) int32, ascending.
    """
    chunks = triton.cdiv(vocab_limit, CHUNK)
    source = (logits, logits.stride(0), work, work.stride(0), vocab_limit, tensors.flags, tensors.temperature)
    levels = (best_values, level_counts, level_masses, kept_masses)
    sizes = {"BLOCK": CHUNK, "CHUNKS": padded_chunks(chunks), "LEVELS": LEVELS}
    grid = (len(logits), chunks)
    _levels_kernel[grid](*source, tensors.min_p, *levels, **sizes, num_warps=_NUM_WARPS_OF_LEVELS)
    chance = (tensors.top_k, tensors.top_p, tensors.seed, tensors.counter)
    _gather_kernel[grid](
        *source,
        *chance,
        *levels,
        candidates,
        candidate_ids,
        **sizes,
        CANDIDATES=CANDIDATES,
        num_warps=_NUM_WARPS_OF_GATHER,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every type of logits."""
    for dtype in ("fp32", "fp16", "bf16"):
        for kernel in (_levels_kernel, _gather_kernel):
            gathers = kernel is _gather_kernel
            signature = {"logits": f"*{dtype}", "logits_stride": "i32", "work": "*fp32", "work_stride": "i32"}
            signature |= {"limit": "i32", "flags": "*i32", "temperature": "*fp32"}
            chance = {"top_k": "*i32", "top_p": "*fp32", "seed": "*i64", "counter": "*i64"}
            signature |= chance if gathers else {"min_p": "*fp32"}
            signature |= {"best_values": "*fp32", "level_counts": "*i32", "level_masses": "*fp32"}
            signature |= {"kept_masses": "*fp32"}
            signature |= {"candidates": "*fp32", "candidate_ids": "*i32"} if gathers else {}
            sizes = {"BLOCK": CHUNK, "CHUNKS": padded_chunks(1), "LEVELS": LEVELS}
            sizes |= {"CANDIDATES": CANDIDATES} if gathers else {}
            pointers = [name for name, kind in signature.items() if kind.startswith("*")]
            yield CompileCase(
                name=f"sampling_{'gather' if gathers else 'levels'}/{dtype}",
                kernel=kernel,
                arch=arch,
                signature=signature | dict.fromkeys(sizes, "constexpr"),
                constexprs=sizes,
                num_warps=_NUM_WARPS_OF_GATHER if gathers else _NUM_WARPS_OF_LEVELS,
                num_stages=3,
                aligned=(*pointers, "logits_stride", "work_stride", "limit"),
            )
