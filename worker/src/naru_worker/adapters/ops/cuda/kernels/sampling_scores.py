"""Log-probabilities and ranks of chosen tokens, and the best tokens beside them, of the raw distribution."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.sampling_numbers import (
    CHUNK,
    IS_IMPOSSIBLE,
    IS_SCORED,
    LAST_ID,
    LOWEST,
    NONE,
    clean,
    from_order,
    order,
    padded_chunks,
)
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingTensors

_NUM_WARPS = 8
_NUM_WARPS_OF_ROWS = 1
_NOBODY = tl.constexpr(-(2**63))


@triton.jit
def _scored(flag):
    return ((flag & IS_SCORED) != 0) & ((flag & IS_IMPOSSIBLE) == 0)


@triton.jit(do_not_specialize=["chunks"])
def _logprob_kernel(
    logits,
    logits_stride,
    limit,
    flags,
    raw_values,
    raw_sums,
    chunks,
    token_ids,
    log_sums,
    logprobs,
    ranks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _scored(tl.load(flags + row)):
        chunk = tl.arange(0, CHUNKS)
        inside = chunk < chunks
        largest = tl.load(raw_values + row * chunks + chunk, mask=inside, other=NONE)
        sums = tl.load(raw_sums + row * chunks + chunk, mask=inside, other=0.0)
        top = tl.max(largest)
        base = tl.where(top == NONE, 0.0, top)
        log_sum = base + tl.log(tl.maximum(tl.sum(sums * tl.exp(largest - base)), 1e-30))
        token = tl.load(token_ids + row)
        x = clean(tl.load(logits + row * logits_stride + token, mask=token < limit, other=NONE))
        tl.store(log_sums + row, log_sum)
        tl.store(logprobs + row, tl.maximum(x - log_sum, LOWEST))
        tl.store(ranks + row, tl.where(token < limit, 1, limit))


@triton.jit(do_not_specialize=["width"])
def _chunk_kernel(
    logits,
    logits_stride,
    limit,
    flags,
    num_logprobs,
    token_ids,
    ranks,
    heads,
    width,
    BLOCK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _scored(tl.load(flags + row)):
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = at < limit
        x = clean(tl.load(logits + row * logits_stride + at, mask=inside, other=NONE))
        token = tl.load(token_ids + row)
        if token < limit:
            chosen = clean(tl.load(logits + row * logits_stride + token))
            is_better = inside & ((x > chosen) | ((x == chosen) & (at < token)))
            num_better = tl.sum(is_better.to(tl.int32))
            if num_better > 0:
                tl.atomic_add(ranks + row, num_better, sem="relaxed")
        # Ordered by logit, of equal ones the lower id first: both in one number, which nobody shares.
        both = (order(x).to(tl.int64) << 32) | (at ^ LAST_ID).to(tl.int64)
        both = tl.where(inside, both, _NOBODY)
        to = heads + (row * tl.num_programs(1) + chunk) * width
        for i in range(0, tl.minimum(tl.load(num_logprobs + row), width)):
            best = tl.max(both)
            tl.store(to + i, best)
            both = tl.where(both == best, _NOBODY, both)


@triton.jit(do_not_specialize=["width", "chunks"])
def _merge_kernel(
    flags,
    num_logprobs,
    heads,
    width,
    chunks,
    log_sums,
    top_ids,
    top_logprobs,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if _scored(tl.load(flags + row)):
        asked, log_sum = tl.load(num_logprobs + row), tl.load(log_sums + row)
        chunk = tl.arange(0, CHUNKS)
        taken = tl.zeros((CHUNKS,), tl.int32)
        for i in range(0, width):
            inside = (chunk < chunks) & (taken < tl.where(i < asked, asked, 0))
            head = tl.load(heads + (row * chunks + chunk) * width + taken, mask=inside, other=_NOBODY)
            best = tl.max(head)
            taken += ((head == best) & inside).to(tl.int32)
            is_there = best != _NOBODY
            x = from_order((best >> 32).to(tl.int32))
            token = (best & 0xFFFFFFFF).to(tl.int32) ^ LAST_ID
            tl.store(top_ids + row * width + i, tl.where(is_there, token, -1))
            value = tl.where(is_there & (x > NONE), tl.maximum(x - log_sum, LOWEST), LOWEST)
            tl.store(top_logprobs + row * width + i, value)


def score(
    logits: Tensor,
    tensors: SamplingTensors,
    vocab_limit: int,
    raw_values: Tensor,
    raw_sums: Tensor,
    token_ids: Tensor,
    log_sums: Tensor,
    heads: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    """Scores the tokens of rows that ask for it; entries of other rows are left as they are.

    Args:
        logits: (R, vocab) raw logits, any float type, last stride 1.
        tensors: What rows ask for.
        vocab_limit: Ids from here on do not exist.
        raw_values: (R, chunks) float32, of `sampling_best`.
        raw_sums: The same.
        token_ids: (R,) int32, chosen.
        log_sums: (R,) float32, scratch. Mutated, as all that follow.
        heads: (R, chunks, K) int64, scratch.
        logprobs: (R,) float32, at least -9999.
        ranks: (R,) int32, 1 is best.
        top_ids: (R, K) int32, best first; -1 where there is no more, or was not asked for more.
        top_logprobs: (R, K) float32.
    """
    num_rows, width = top_ids.shape
    chunks = raw_values.shape[1]
    padded = padded_chunks(chunks)
    stride = logits.stride(0)
    _logprob_kernel[(num_rows,)](
        logits,
        stride,
        vocab_limit,
        tensors.flags,
        raw_values,
        raw_sums,
        chunks,
        token_ids,
        log_sums,
        logprobs,
        ranks,
        CHUNKS=padded,
        num_warps=_NUM_WARPS_OF_ROWS,
    )
    _chunk_kernel[(num_rows, chunks)](
        logits,
        stride,
        vocab_limit,
        tensors.flags,
        tensors.num_logprobs,
        token_ids,
        ranks,
        heads,
        width,
        BLOCK=CHUNK,
        num_warps=_NUM_WARPS,
    )
    if width:
        _merge_kernel[(num_rows,)](
            tensors.flags,
            tensors.num_logprobs,
            heads,
            width,
            chunks,
            log_sums,
            top_ids,
            top_logprobs,
            CHUNKS=padded,
            num_warps=_NUM_WARPS_OF_ROWS,
        )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every type of logits."""
    rows = {"flags": "*i32", "num_logprobs": "*i32"}
    for dtype in ("fp32", "fp16", "bf16"):
        logits = {"logits": f"*{dtype}", "logits_stride": "i32", "limit": "i32"}
        yield CompileCase(
            name=f"sampling_chunk_scores/{dtype}",
            kernel=_chunk_kernel,
            arch=arch,
            signature=logits
            | rows
            | {"token_ids": "*i32", "ranks": "*i32", "heads": "*i64", "width": "i32", "BLOCK": "constexpr"},
            constexprs={"BLOCK": CHUNK},
            num_warps=_NUM_WARPS,
            num_stages=3,
            aligned=("logits", "logits_stride", "limit", *rows, "token_ids", "ranks", "heads"),
        )
        outputs = ("log_sums", "logprobs")
        yield CompileCase(
            name=f"sampling_logprobs/{dtype}",
            kernel=_logprob_kernel,
            arch=arch,
            signature=logits
            | {"flags": "*i32", "raw_values": "*fp32", "raw_sums": "*fp32", "chunks": "i32", "token_ids": "*i32"}
            | dict.fromkeys(outputs, "*fp32")
            | {"ranks": "*i32", "CHUNKS": "constexpr"},
            constexprs={"CHUNKS": padded_chunks(1)},
            num_warps=_NUM_WARPS_OF_ROWS,
            num_stages=3,
            aligned=(
                "logits",
                "logits_stride",
                "limit",
                "flags",
                "raw_values",
                "raw_sums",
                "token_ids",
                *outputs,
                "ranks",
            ),
        )
    yield CompileCase(
        name="sampling_merge_scores",
        kernel=_merge_kernel,
        arch=arch,
        signature=rows
        | {"heads": "*i64", "width": "i32", "chunks": "i32", "log_sums": "*fp32", "top_ids": "*i32"}
        | {"top_logprobs": "*fp32", "CHUNKS": "constexpr"},
        constexprs={"CHUNKS": padded_chunks(1)},
        num_warps=_NUM_WARPS_OF_ROWS,
        num_stages=3,
        aligned=(*rows, "heads", "log_sums", "top_ids", "top_logprobs"),
    )
