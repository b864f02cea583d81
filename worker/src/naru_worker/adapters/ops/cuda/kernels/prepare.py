"""Decode steps out of a table of requests on the device: a step can be launched before the last one's tokens are known.

`prepare_decode` makes the inputs of a step of one token a request, `advance` puts the sampled tokens back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

BLOCKS_PER_TURN = 256
_NUM_WARPS = 2
_ROWS_PER_PROGRAM = 128
_NUM_WARPS_OF_ROWS = 4


@dataclass(frozen=True, slots=True)
class RequestTable:
    """What a GPU knows of its running requests, one line each. Lines of nobody may hold anything."""

    last_token: Tensor  # (T,) int32, fed next
    num_computed: Tensor  # (T,) int32, tokens whose keys and values are in the cache: the next one's position
    block_table: Tensor  # (T, max_blocks) int32

    @staticmethod
    def make(num_lines: int, max_blocks: int, device: torch.device | str) -> RequestTable:
        """An empty one."""

        def make(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return RequestTable(make(num_lines), make(num_lines), make(num_lines, max_blocks))


@triton.jit(do_not_specialize=["table_stride", "max_blocks", "out_stride"])
def _prepare_kernel(
    lines,
    last_token,
    num_computed,
    table,
    table_stride,
    block_size,
    max_blocks,
    token_ids,
    positions,
    slots,
    seq_lens,
    out_table,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines + row)
    is_real = line >= 0
    held = tl.maximum(line, 0).to(tl.int64)
    position = tl.load(num_computed + held)
    place = position // block_size
    # Beyond its blocks a request has nowhere to go: an extra step after its last one writes nothing.
    is_real = is_real & (place < max_blocks)
    position = tl.where(is_real, position, 0)
    block = tl.load(table + held * table_stride + tl.where(is_real, place, 0))
    tl.store(token_ids + row, tl.where(is_real, tl.load(last_token + held), 0))
    tl.store(positions + row, position)
    tl.store(slots + row, tl.where(is_real, block * block_size + position % block_size, -1))
    tl.store(seq_lens + row, tl.where(is_real, position + 1, 0))
    count = tl.where(is_real, place + 1, 0)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        blocks = tl.load(table + held * table_stride + at, mask=at < count, other=0)
        tl.store(out_table + row * out_stride + at, blocks, mask=at < count)


@triton.jit(do_not_specialize=["num_rows"])
def _advance_kernel(lines, num_rows, sampled, last_token, num_computed, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(lines + row, mask=row < num_rows, other=-1)
    is_real = line >= 0
    tl.store(last_token + line, tl.load(sampled + row, mask=is_real, other=0), mask=is_real)
    tl.store(num_computed + line, tl.load(num_computed + line, mask=is_real, other=0) + 1, mask=is_real)


def prepare_decode(
    table: RequestTable,
    lines: Tensor,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
) -> None:
    """Fills the inputs of a step in which each request feeds the token it drew last.

    Args:
        table: Read only.
        lines: (B,) int32, the request of each row; -1: padding, whose slot is -1 and whose seq_len is 0.
        block_size: Tokens of a KV block.
        token_ids: (B,) int32. Mutated, as all that follow.
        positions: (B,) int32.
        slots: (B,) int32; -1, too, where a request has no block for the token.
        seq_lens: (B,) int32, this token included.
        block_table: (B, at least the table's width) int32; entries beyond a row's seq_len stay as they are.
    """
    if len(lines) == 0:
        return
    _prepare_kernel[(len(lines),)](
        lines,
        table.last_token,
        table.num_computed,
        table.block_table,
        table.block_table.stride(0),
        block_size,
        table.block_table.shape[1],
        token_ids,
        positions,
        slots,
        seq_lens,
        block_table,
        block_table.stride(0),
        BLOCK=BLOCKS_PER_TURN,
        num_warps=_NUM_WARPS,
    )


def advance(table: RequestTable, lines: Tensor, sampled: Tensor) -> None:
    """Makes the sampled tokens those that are fed next.

    Args:
        table: `last_token` and `num_computed` of the lines are mutated.
        lines: (B,) int32, none twice; -1: padding.
        sampled: (B,) int32.
    """
    if len(lines) == 0:
        return
    _advance_kernel[(triton.cdiv(len(lines), _ROWS_PER_PROGRAM),)](
        lines,
        len(lines),
        sampled,
        table.last_token,
        table.num_computed,
        BLOCK=_ROWS_PER_PROGRAM,
        num_warps=_NUM_WARPS_OF_ROWS,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both kernels."""
    lines = ("lines", "last_token", "num_computed", "table")
    outputs = ("token_ids", "positions", "slots", "seq_lens", "out_table")
    signature = dict.fromkeys(lines, "*i32") | dict.fromkeys(("table_stride", "block_size", "max_blocks"), "i32")
    signature |= dict.fromkeys(outputs, "*i32") | {"out_stride": "i32", "BLOCK": "constexpr"}
    yield CompileCase(
        name="prepare_decode",
        kernel=_prepare_kernel,
        arch=arch,
        signature=signature,
        constexprs={"BLOCK": BLOCKS_PER_TURN},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=(*lines, *outputs, "block_size"),
    )
    yield CompileCase(
        name="advance",
        kernel=_advance_kernel,
        arch=arch,
        signature={"lines": "*i32", "num_rows": "i32", "sampled": "*i32", "last_token": "*i32", "num_computed": "*i32"}
        | {"BLOCK": "constexpr"},
        constexprs={"BLOCK": _ROWS_PER_PROGRAM},
        num_warps=_NUM_WARPS_OF_ROWS,
        num_stages=3,
        aligned=("lines", "sampled", "last_token", "num_computed"),
    )
