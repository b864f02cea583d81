"""Low-rank adapters for rows that have different ones: y += scale * (x @ A.T) @ B.T, row by row.

Rows are sorted by adapter as tokens are by expert (`expert_schedule`), once a step. The inner product is split along
the columns of x, at fixed places; its parts are added in order by whoever reads them. So a row's numbers depend on the
row and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.expert_schedule import ExpertSchedule, schedule_experts
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime

MAX_RANK = 64
RANKS = (16, 32, 64)
"""What ranks are padded to."""
_TILE_TOKENS: dict[Regime, int] = {"generated": 16, "prompt": 64}
_WARPS: dict[Regime, int] = {"generated": 2, "prompt": 4}
_SPLIT_COLUMNS = 512
_COLUMNS = 64
"""Columns of x that are loaded together."""
_ROWS = 128
"""Rows of B that a program multiplies with."""
_NUM_STAGES = 3


def padded_rank(rank: int) -> int:
    """What A and B are to be padded to, with zeros.

    Raises:
        ValueError: it is larger than `MAX_RANK`.
    """
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"an adapter of rank {rank} is given; ranks from 1 to {MAX_RANK} are supported")
    return next(size for size in RANKS if rank <= size)


@triton.jit
def _shrink_kernel(
    x, a, pairs, tile_adapters, parts, num_columns, num_slots, a_rows, x_stride,
    RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    adapter = tl.load(tile_adapters + tl.program_id(0)).to(tl.int64)
    if adapter < 0:
        return
    slots = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tokens = tl.load(pairs + slots).to(tl.int64)
    ranks = tl.program_id(2) * RANK + tl.arange(0, RANK)
    first = tl.program_id(1) * SPLIT
    total = tl.zeros((TOKENS, RANK), tl.float32)
    for start in range(0, SPLIT, COLUMNS):
        columns = first + start + tl.arange(0, COLUMNS)
        inside = (columns < num_columns)[None, :]
        given = tl.load(
            x + tokens[:, None] * x_stride + columns[None, :], mask=(tokens >= 0)[:, None] & inside, other=0.0
        )
        rows = (adapter * a_rows + ranks)[:, None]
        weights = tl.load(a + rows * num_columns + columns[None, :], mask=inside, other=0.0)
        total = tl.dot(given, tl.trans(weights), total, input_precision="ieee")
    lines = (tl.program_id(1) * num_slots + slots).to(tl.int64)
    tl.store(parts + lines[:, None] * a_rows + ranks[None, :], total)


@triton.jit(do_not_specialize=("first_rank", "num_splits"))
def _expand_kernel(
    parts, b, scales, pairs, tile_adapters, y, num_rows, num_slots, num_splits, a_rows, first_rank, y_stride,
    RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    adapter = tl.load(tile_adapters + tl.program_id(0)).to(tl.int64)
    if adapter < 0:
        return
    slots = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tokens = tl.load(pairs + slots).to(tl.int64)
    ranks = tl.arange(0, RANK)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.zeros((TOKENS, RANK), tl.float32)
    for split in range(num_splits):
        lines = (split * num_slots + slots).to(tl.int64)
        inner += tl.load(parts + lines[:, None] * a_rows + (first_rank + ranks)[None, :])
    at = (adapter * num_rows + rows)[:, None] * RANK + ranks[None, :]
    weights = tl.load(b + at, mask=(rows < num_rows)[:, None], other=0.0)
    added = tl.dot(inner.to(weights.dtype), tl.trans(weights), input_precision="ieee") * tl.load(scales + adapter)
    to = y + tokens[:, None] * y_stride + rows[None, :]
    inside = (tokens >= 0)[:, None] & (rows < num_rows)[None, :]
    tl.store(to, (tl.load(to, mask=inside, other=0.0).to(tl.float32) + added).to(y.dtype.element_ty), mask=inside)


def schedule_adapters(adapters: Tensor, num_adapters: int, *, regime: Regime) -> ExpertSchedule:
    """Sorts rows by adapter, once for all layers of a step.

    Args:
        adapters: (M,), int32, contiguous: the adapter of each row; -1: none.
        num_adapters: Places for adapters, taken or not.
        regime: The kind of the rows.
    """
    return schedule_experts(adapters[:, None], num_adapters, tile_tokens=_TILE_TOKENS[regime])


def lora_shrink(x: Tensor, a: Tensor, schedule: ExpertSchedule, *, rank: int, regime: Regime) -> Tensor:
    """Parts of x @ A.T for each slot.

    Args:
        x: (M, K), 16 bits (float32 under the interpreter); rows may be strided.
        a: (num_adapters, slices * rank, K), contiguous, the type of x: the A of one layer, or of several that read the
            same x (q, k and v), one below the other.
        schedule: Of `schedule_adapters`.
        rank: One of `RANKS`.
        regime: The kind of the rows.

    Returns:
        (splits, slots, slices * rank), float32, to be added along the first axis; slots without an adapter are not
        written.

    Source: the two steps of Punica's and S-LoRA's kernels for batches of many adapters.
    """
    slots, splits, rows = len(schedule.pairs), triton.cdiv(x.shape[1], _SPLIT_COLUMNS), a.shape[1]
    parts = torch.empty((splits, slots, rows), dtype=torch.float32, device=x.device)
    if slots:
        _shrink_kernel[(schedule.max_tiles, splits, rows // rank)](
            x, a, schedule.pairs, schedule.tile_experts, parts, x.shape[1], slots, rows, x.stride(0),
            RANK=rank, TOKENS=schedule.tile_tokens, COLUMNS=_COLUMNS, SPLIT=_SPLIT_COLUMNS,
            num_warps=_WARPS[regime], num_stages=_NUM_STAGES,
        )  # fmt: skip
    return parts


def lora_expand(
    parts: Tensor, b: Tensor, scales: Tensor, schedule: ExpertSchedule, y: Tensor, *, regime: Regime, index: int = 0
) -> None:
    """Adds scale * inner @ B.T to the rows that have an adapter.

    Args:
        parts: Of `lora_shrink`.
        b: (num_adapters, num_rows, rank), contiguous, 16 bits (float32 under the interpreter).
        scales: (num_adapters,), float32.
        schedule: Of `schedule_adapters`.
        y: (M, num_rows), mutated; rows may be strided: columns of a wider output.
        regime: The kind of the rows.
        index: Which of the slices of `parts` is this layer's.
    """
    rows, rank = b.shape[1:]
    splits, slots, width = parts.shape
    if slots:
        _expand_kernel[(schedule.max_tiles, triton.cdiv(rows, _ROWS))](
            parts, b, scales, schedule.pairs, schedule.tile_experts, y, rows, slots, splits, width, index * rank,
            y.stride(0), RANK=rank, TOKENS=schedule.tile_tokens, ROWS=_ROWS, num_warps=_WARPS[regime], num_stages=1,
        )  # fmt: skip


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """All ranks and types, for generated and for prompt rows."""
    for dtype in ("fp16", "bf16"):
        for rank in RANKS:
            for regime, tokens in _TILE_TOKENS.items():
                sizes = {"RANK": rank, "TOKENS": tokens}
                name = f"{dtype}/r{rank}/{regime}"
                constants = sizes | {"COLUMNS": _COLUMNS, "SPLIT": _SPLIT_COLUMNS}
                yield _case(f"lora_shrink/{name}", _shrink_kernel, arch, dtype, constants, regime, _NUM_STAGES)
                yield _case(f"lora_expand/{name}", _expand_kernel, arch, dtype, sizes | {"ROWS": _ROWS}, regime, 1)


def _case(
    name: str, kernel: object, arch: int, dtype: str, constants: dict[str, int], regime: Regime, stages: int
) -> CompileCase:
    types = {"pairs": "*i32", "tile_adapters": "*i32", "parts": "*fp32", "scales": "*fp32"}
    types |= dict.fromkeys(("x", "a", "b", "y"), f"*{dtype}")
    names = kernel.arg_names  # type: ignore[attr-defined]  # what triton.jit makes of a function has them
    sizes = ("num_columns", "num_rows", "num_slots", "a_rows", "x_stride", "y_stride")
    return CompileCase(
        name=name,
        kernel=kernel,
        arch=arch,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs=constants,
        num_warps=_WARPS[regime],
        num_stages=stages,
        aligned=tuple(n for n in names if n in (*types, *sizes)),
        expects=("HGMMA",) if arch >= 90 and regime == "prompt" else ("HMMA",),
    )
