"""Copies whole KV blocks within the cache, all layers at once."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

WORDS_PER_PROGRAM = 2048
"""32-bit words that one program copies."""
_NUM_WARPS = 4


@triton.jit
def _copy_kernel(blocks, pairs, block_words, WORDS: tl.constexpr):
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64)
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < block_words
    words = tl.load(blocks + source * block_words + at, mask=inside)
    tl.store(blocks + destination * block_words + at, words, mask=inside)


def copy_blocks(blocks: Tensor, pairs: Tensor) -> None:
    """Copies blocks[pairs[i, 0]] over blocks[pairs[i, 1]].

    Args:
        blocks: (num_blocks, words), int32, contiguous: the cache, seen as words. Mutated.
        pairs: (C, 2), int32, on the same device. No destination is a source of another pair, or comes twice.
    """
    if len(pairs) == 0:
        return
    words = blocks.shape[1]
    grid = (len(pairs), triton.cdiv(words, WORDS_PER_PROGRAM))
    _copy_kernel[grid](blocks, pairs, words, WORDS=WORDS_PER_PROGRAM, num_warps=_NUM_WARPS)


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The kernel as it is launched on an architecture."""
    yield CompileCase(
        name="copy_blocks",
        kernel=_copy_kernel,
        arch=arch,
        signature={"blocks": "*i32", "pairs": "*i32", "block_words": "i32", "WORDS": "constexpr"},
        constexprs={"WORDS": WORDS_PER_PROGRAM},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=("blocks", "pairs", "block_words"),
    )
