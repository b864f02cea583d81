"""Puts tokens that the step before drew where the host could not know them yet."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_ROWS = 256
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_tokens"])
def _drawn_tokens_kernel(token_ids, drawn, num_tokens, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < num_tokens
    ids = tl.load(token_ids + at, mask=inside, other=0)
    is_open = inside & (ids < 0)
    known = tl.load(drawn - 1 - ids, mask=is_open, other=0)
    # A row that lost its mask drew -1: whatever follows is dropped, but it must be a token.
    tl.store(token_ids + at, tl.maximum(known, 0), mask=is_open)


def fill_drawn_tokens(token_ids: Tensor, drawn: Tensor) -> None:
    """Replaces each id below 0 by ``drawn[-1 - id]``.

    Args:
        token_ids: (M,) int32, contiguous. Mutated.
        drawn: (R,) int32, contiguous: what each row of the step before drew.
    """
    grid = (triton.cdiv(len(token_ids), _ROWS),)
    _drawn_tokens_kernel[grid](token_ids, drawn, len(token_ids), ROWS=_ROWS, num_warps=_NUM_WARPS)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The kernel as it is launched on an architecture."""
    yield CompileCase(
        name="drawn_tokens",
        kernel=_drawn_tokens_kernel,
        arch=arch,
        signature={"token_ids": "*i32", "drawn": "*i32", "num_tokens": "i32", "ROWS": "constexpr"},
        constexprs={"ROWS": _ROWS},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=("token_ids", "drawn"),
    )
