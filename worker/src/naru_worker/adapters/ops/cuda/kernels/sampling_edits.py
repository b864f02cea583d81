"""Masks, penalties, biases and bans: copies of the logits that they change, row by row."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import CHUNK, IS_EDITED, NONE, clean
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingTensors

ENTRIES_PER_TURN = 512
_NUM_WARPS = 8
_NUM_WARPS_OF_ENTRIES = 4


@triton.jit(do_not_specialize=["words_per_mask"])
def _copy_kernel(
    logits, logits_stride, work, work_stride, limit, flags, mask_rows, mask_words, words_per_mask, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(flags + row) & IS_EDITED) != 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < limit
        x = clean(tl.load(logits + row * logits_stride + at, mask=inside, other=NONE))
        if mask_words is not None:
            mask_row = tl.load(mask_rows + row)
            if mask_row >= 0:
                words = mask_words + mask_row.to(tl.int64) * words_per_mask
                word = tl.load(words + at // 32, mask=inside, other=0)
                x = tl.where(((word >> (at % 32)) & 1) != 0, x, NONE)
        tl.store(work + row * work_stride + at, x, mask=inside)


@triton.jit
def _penalised(x, count, repetition, presence, frequency):
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    return tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)


@triton.jit
def _entries_kernel(
    work,
    work_stride,
    limit,
    flags,
    presence_penalty,
    frequency_penalty,
    repetition_penalty,
    penalty_start,
    penalty_ids,
    penalty_counts,
    bias_start,
    bias_ids,
    bias_values,
    banned_start,
    banned_ids,
    pending,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(flags + row) & IS_EDITED) != 0:
        to = work + row * work_stride
        turn = tl.arange(0, BLOCK)
        repetition = tl.load(repetition_penalty + row)
        presence, frequency = tl.load(presence_penalty + row), tl.load(frequency_penalty + row)
        newest = tl.full((), -1, tl.int32)
        if pending is not None:
            newest = tl.load(pending + row)
        num_found = 0
        end = tl.load(penalty_start + row + 1)
        for first in range(tl.load(penalty_start + row), end, BLOCK):
            token = tl.load(penalty_ids + first + turn, mask=first + turn < end, other=limit)
            count = tl.load(penalty_counts + first + turn, mask=first + turn < end, other=0)
            inside = (token >= 0) & (token < limit)
            is_newest = ((token == newest) & inside).to(tl.int32)
            num_found += tl.sum(is_newest)
            x = tl.load(to + token, mask=inside, other=0.0)
            tl.store(to + token, _penalised(x, count + is_newest, repetition, presence, frequency), mask=inside)
        if (newest >= 0) & (newest < limit) & (num_found == 0):
            x = tl.load(to + newest)
            tl.store(to + newest, _penalised(x, newest * 0 + 1, repetition, presence, frequency))
        tl.debug_barrier()
        end = tl.load(bias_start + row + 1)
        for first in range(tl.load(bias_start + row), end, BLOCK):
            token = tl.load(bias_ids + first + turn, mask=first + turn < end, other=limit)
            value = tl.load(bias_values + first + turn, mask=first + turn < end, other=0.0)
            # An id may come twice.
            tl.atomic_add(to + token, value, mask=(token >= 0) & (token < limit), sem="relaxed", scope="cta")
        tl.debug_barrier()
        end = tl.load(banned_start + row + 1)
        for first in range(tl.load(banned_start + row), end, BLOCK):
            token = tl.load(banned_ids + first + turn, mask=first + turn < end, other=limit)
            tl.store(to + token, tl.full((BLOCK,), NONE, tl.float32), mask=(token >= 0) & (token < limit))


def edit(
    logits: Tensor,
    tensors: SamplingTensors,
    work: Tensor,
    vocab_limit: int,
    *,
    has_masks: bool,
    pending: Tensor | None = None,
) -> None:
    """Copies the rows of `logits` that are to be edited to `work`, and edits them there; others are left alone.

    Args:
        logits: (R, vocab), any float type, last stride 1.
        tensors: What to do.
        work: (R, at least vocab_limit) float32, last stride 1. Mutated: edited rows, which may hold +inf and NaN.
        vocab_limit: Ids from here on do not exist.
        has_masks: Whether any row may have a mask.
        pending: (R,) int32, output tokens that the penalties do not count yet, one a row; -1: none.
    """
    num_rows = len(logits)
    _copy_kernel[(num_rows, triton.cdiv(vocab_limit, CHUNK))](
        logits,
        logits.stride(0),
        work,
        work.stride(0),
        vocab_limit,
        tensors.flags,
        tensors.mask_rows if has_masks else None,
        tensors.mask_words if has_masks else None,
        tensors.mask_words.shape[1],
        BLOCK=CHUNK,
        num_warps=_NUM_WARPS,
    )
    _entries_kernel[(num_rows,)](
        work,
        work.stride(0),
        vocab_limit,
        tensors.flags,
        tensors.presence_penalty,
        tensors.frequency_penalty,
        tensors.repetition_penalty,
        tensors.penalty_start,
        tensors.penalty_ids,
        tensors.penalty_output_counts,
        tensors.bias_start,
        tensors.bias_ids,
        tensors.bias_values,
        tensors.banned_start,
        tensors.banned_ids,
        pending,
        BLOCK=ENTRIES_PER_TURN,
        num_warps=_NUM_WARPS_OF_ENTRIES,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Copies of every type with and without masks; the edits."""
    for dtype in ("fp32", "fp16", "bf16"):
        for has_masks in (False, True):
            held = "*i32" if has_masks else "constexpr"
            yield CompileCase(
                name=f"sampling_copy/{dtype}" + "/masks" * has_masks,
                kernel=_copy_kernel,
                arch=arch,
                signature={"logits": f"*{dtype}", "logits_stride": "i32", "work": "*fp32"}
                | {"work_stride": "i32", "limit": "i32"}
                | {"flags": "*i32", "mask_rows": held, "mask_words": held, "words_per_mask": "i32"}
                | {"BLOCK": "constexpr"},
                constexprs={"BLOCK": CHUNK} | ({} if has_masks else {"mask_rows": None, "mask_words": None}),
                num_warps=_NUM_WARPS,
                num_stages=3,
                aligned=(
                    "logits",
                    "logits_stride",
                    "work",
                    "work_stride",
                    "limit",
                    "flags",
                    *(("mask_rows", "mask_words") if has_masks else ()),
                ),
            )
    floats = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    lists = ("penalty_start", "penalty_ids", "penalty_counts", "bias_start", "bias_ids", "bias_values")
    bans = ("banned_start", "banned_ids")
    signature = {"work": "*fp32", "work_stride": "i32", "limit": "i32", "flags": "*i32"} | dict.fromkeys(
        floats, "*fp32"
    )
    signature |= dict.fromkeys(lists + bans, "*i32") | {"bias_values": "*fp32"}
    for held in ("constexpr", "*i32"):
        has_pending = held != "constexpr"
        yield CompileCase(
            name="sampling_entries" + "/pending" * has_pending,
            kernel=_entries_kernel,
            arch=arch,
            signature=signature | {"pending": held, "BLOCK": "constexpr"},
            constexprs={"BLOCK": ENTRIES_PER_TURN} | ({} if has_pending else {"pending": None}),
            num_warps=_NUM_WARPS_OF_ENTRIES,
            num_stages=3,
            aligned=(
                "work",
                "work_stride",
                "limit",
                "flags",
                *floats,
                *lists,
                *bans,
                *(("pending",) if has_pending else ()),
            ),
        )
