"""The best token of each chunk of a row's logits, and the chunk's share of the row's softmax."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import CHUNK, IS_EDITED, IS_SCORED, LAST_ID, NONE, clean

_NUM_WARPS = 8


@triton.jit
def _best_kernel(
    logits,
    logits_stride,
    work,
    work_stride,
    limit,
    flags,
    best_values,
    best_ids,
    raw_values,
    raw_sums,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flag = tl.load(flags + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < limit
    place = row * tl.num_programs(1) + chunk
    x = clean(tl.load(logits + row * logits_stride + at, mask=inside, other=NONE))
    if raw_sums is not None:
        if (flag & IS_SCORED) != 0:
            largest = tl.max(x)
            tl.store(raw_values + place, largest)
            tl.store(raw_sums + place, tl.sum(tl.exp(x - tl.where(largest == NONE, 0.0, largest))))
    if work is not None:
        is_edited = (flag & IS_EDITED) != 0
        edited = tl.load(work + row * work_stride + at, mask=at < tl.where(is_edited, limit, 0), other=NONE)
        x = tl.where(is_edited, clean(edited), x)
    largest = tl.max(x)
    tl.store(best_values + place, largest)
    tl.store(best_ids + place, tl.min(tl.where((x == largest) & inside, at, LAST_ID)))


def best(
    logits: Tensor,
    flags: Tensor,
    work: Tensor | None,
    vocab_limit: int,
    best_values: Tensor,
    best_ids: Tensor,
    raw_values: Tensor | None,
    raw_sums: Tensor | None,
) -> None:
    """Fills (R, chunks) arrays: the largest logit of each chunk and its lowest id; of scored rows largest and sum.

    Args:
        logits: (R, vocab), any float type, last stride 1.
        flags: (R,) what rows need.
        work: (R, at least vocab_limit) float32 with the edited rows, which are looked at there; None: there are none.
        vocab_limit: Ids from here on do not exist.
        best_values: (R, chunks) float32. Mutated, as the others.
        best_ids: (R, chunks) int32.
        raw_values: (R, chunks) float32, before all edits; None: no row is scored.
        raw_sums: (R, chunks) float32, of exp(logit - largest of the chunk).
    """
    _best_kernel[(len(logits), triton.cdiv(vocab_limit, CHUNK))](
        logits,
        logits.stride(0),
        work,
        0 if work is None else work.stride(0),
        vocab_limit,
        flags,
        best_values,
        best_ids,
        raw_values,
        raw_sums,
        BLOCK=CHUNK,
        num_warps=_NUM_WARPS,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every type, with and without edited and scored rows."""
    for dtype in ("fp32", "fp16", "bf16"):
        for has_edits in (False, True):
            for has_scores in (False, True):
                signature = {"logits": f"*{dtype}", "logits_stride": "i32", "work": "*fp32"}
                signature |= {"work_stride": "i32", "limit": "i32"}
                signature |= {"flags": "*i32", "best_values": "*fp32", "best_ids": "*i32"}
                signature |= {"raw_values": "*fp32", "raw_sums": "*fp32", "BLOCK": "constexpr"}
                absent = {"work"} if not has_edits else set()
                absent |= {"raw_values", "raw_sums"} if not has_scores else set()
                signature |= dict.fromkeys(absent, "constexpr")
                yield CompileCase(
                    name=f"sampling_best/{dtype}" + "/edits" * has_edits + "/scores" * has_scores,
                    kernel=_best_kernel,
                    arch=arch,
                    signature=signature,
                    constexprs=dict.fromkeys(absent) | {"BLOCK": CHUNK},
                    num_warps=_NUM_WARPS,
                    num_stages=3,
                    aligned=(
                        *(name for name, kind in signature.items() if kind.startswith("*")),
                        "logits_stride",
                        "work_stride",
                        "limit",
                    ),
                )
