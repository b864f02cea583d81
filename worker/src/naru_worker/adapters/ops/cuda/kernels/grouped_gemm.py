"""Products of sorted tokens with their experts' weights (mixtures of experts), and the weighted sum afterwards.

Between the two products of an expert, tokens stay in the order of the schedule. The sum over a token's experts is in
the order of its choices, so it is deterministic. Experts' weights are of 16 bits, or quantized in groups: then all
experts are one matrix, one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.expert_schedule import ExpertSchedule
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime, Tile
from naru_worker.adapters.ops.cuda.kernels.group_layout import KINDS, GroupKind, GroupRows, quants_to_floats

_TILES: dict[int, dict[Regime, Tile]] = {
    80: {"generated": Tile(64, 16, 4, 4), "prompt": Tile(64, 64, 4, 3)},
    89: {"generated": Tile(64, 16, 4, 4), "prompt": Tile(64, 64, 4, 3)},
    90: {"generated": Tile(64, 16, 4, 5), "prompt": Tile(128, 64, 4, 4)},
}
_DENSE_COLUMNS = 64
"""Columns of a plain weight that are loaded together."""
_COMBINE_COLUMNS = 512
_DENSE = GroupKind(8, 0, 0, False)
"""Stands for 16-bit weights in the kernel's constants: 8 bits are not read then."""


@triton.jit(do_not_specialize=("num_chunks", "group_bits", "divisor"))
def _grouped_kernel(
    x, weights, scales, minimums, pairs, tile_experts, out,
    expert_rows, all_rows, num_columns, num_chunks, group_bits, divisor, x_stride, out_stride,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, IS_ROW: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, IS_DENSE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    slots = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.load(pairs + slots)
    # What the first product reads are tokens (pair // top_k); the second reads slots, which divisor 0 says.
    sources = tl.where(divisor > 0, pair // tl.maximum(divisor, 1), slots).to(tl.int64)
    is_there = (pair >= 0)[:, None]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows < expert_rows)[:, None]
    stored = (expert * expert_rows + rows).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    PARTS: tl.constexpr = 1 if IS_DENSE else 8 // BITS
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for chunk in range(num_chunks):
        elements = tl.arange(0, CHUNK)
        if IS_DENSE:
            columns = chunk * CHUNK + elements
            at = stored[:, None] * num_columns + columns[None, :]
            packed = tl.load(weights + at, mask=inside & (columns < num_columns)[None, :], other=0.0)
        else:
            at = (chunk * all_rows + stored[:, None]) * CHUNK + elements[None, :]
            packed = tl.load(weights + at, mask=inside, other=0)
        for half in tl.static_range(PARTS):
            column = (chunk * PARTS + half) * CHUNK
            columns = column + elements
            given = tl.load(
                x + sources[:, None] * x_stride + columns[None, :],
                mask=is_there & (columns < num_columns)[None, :],
                other=0.0,
            )
            values = packed
            if not IS_DENSE:
                integers = packed
                if BITS == 4:
                    integers = (packed >> (4 * half)) & 15
                if IS_ROW:
                    values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype)
                else:
                    group = (column >> group_bits) * all_rows + stored
                    scaled = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, tl.float32)
                    scaled *= tl.load(scales + group, mask=rows < expert_rows, other=0.0).to(tl.float32)[:, None]
                    if HAS_MINIMUM:
                        minimum = tl.load(minimums + group, mask=rows < expert_rows, other=0.0)
                        scaled += minimum.to(tl.float32)[:, None]
                    values = scaled.to(dtype)
            total = tl.dot(values, tl.trans(given), total, input_precision="ieee")
    if IS_ROW:
        total *= tl.load(scales + stored, mask=rows < expert_rows, other=0.0).to(tl.float32)[:, None]
    to = out + slots.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside & (pair >= 0)[None, :])


@triton.jit(do_not_specialize=("has_residual",))
def _combine_kernel(
    y, slot_of_pair, routing, residual, out, num_columns, y_stride, residual_stride, out_stride, has_residual,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    at = token * residual_stride + columns
    total = tl.load(residual + at, mask=columns < num_columns * has_residual, other=0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slot_of_pair + token * TOP_K + choice).to(tl.int64)
        weight = tl.load(routing + token * TOP_K + choice).to(tl.float32)
        reached = tl.where(slot >= 0, num_columns, 0)
        given = tl.load(y + slot * y_stride + columns, mask=columns < reached, other=0.0).to(tl.float32)
        # Nothing comes of a choice that is none, whatever its weight is.
        total += tl.where(slot >= 0, weight, 0.0) * given
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)


def tile_tokens(regime: Regime, arch: int) -> int:
    """The size of tiles that a schedule is to have."""
    return _TILES[arch][regime].tokens


def grouped_gemm(
    x: Tensor, weight: Tensor | GroupRows, num_experts: int, schedule: ExpertSchedule, *,
    regime: Regime, is_sorted: bool, arch: int = 80,
) -> Tensor:  # fmt: skip
    """Each slot's row times its expert's weight, transposed.

    Args:
        x: (M, num_columns), the tokens; or (slots, num_columns), what this function gave. 16 bits (float32 under the
            interpreter).
        weight: (num_experts, rows, num_columns), contiguous, the type of x; or all experts' rows quantized.
        num_experts: How many there are.
        schedule: Made for `tile_tokens(regime, arch)`.
        regime: The kind of the tokens.
        is_sorted: Whether x is in the order of slots.
        arch: One of `ARCHITECTURES`.

    Returns:
        (slots, rows); slots without a token are not written.
    """
    tile = _TILES[arch][regime]
    assert schedule.tile_tokens == tile.tokens and x.stride(1) == 1
    is_dense = isinstance(weight, Tensor)
    kind = _DENSE if isinstance(weight, Tensor) else weight.kind
    rows, columns = weight.shape[1:] if isinstance(weight, Tensor) else (weight.num_rows // num_experts, x.shape[1])
    out = torch.empty((len(schedule.pairs), rows), dtype=x.dtype, device=x.device)
    if schedule.max_tiles == 0:
        return out
    quants, scales, minimums = (weight, out, out) if isinstance(weight, Tensor) else _tensors(weight)
    constants = kind.constants | ({"CHUNK": _DENSE_COLUMNS} if is_dense else {})
    _grouped_kernel[(triton.cdiv(rows, tile.rows), schedule.max_tiles)](
        x, quants, scales, minimums, schedule.pairs, schedule.tile_experts, out, rows, rows * num_experts, columns,
        triton.cdiv(columns, _DENSE_COLUMNS) if is_dense else kind.num_chunks(columns), kind.group_bits,
        0 if is_sorted else schedule.top_k, x.stride(0), out.stride(0), **constants, IS_DENSE=is_dense,
        ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _tensors(weight: GroupRows) -> tuple[Tensor, Tensor, Tensor]:
    return weight.quants, weight.scales, weight.scales if weight.minimums is None else weight.minimums


def combine_experts(
    y: Tensor, schedule: ExpertSchedule, routing: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """For each token the sum of its experts' results, times their routing weights, in the order of its choices.

    Args:
        y: (slots, columns), of the last `grouped_gemm`.
        schedule: That it was made with.
        routing: (M, top_k), any float type, contiguous.
        residual: (M, columns), the type of y. May be `out`.
        out: (M, columns), the type of y, mutated; rows may be strided. Made when None.
    """
    tokens, columns = len(routing), y.shape[1]
    if out is None:
        out = torch.empty((tokens, columns), dtype=y.dtype, device=y.device)
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(columns, _COMBINE_COLUMNS))](
            y, schedule.slot_of_pair, routing, out if residual is None else residual, out, columns, y.stride(0),
            0 if residual is None else residual.stride(0), out.stride(0), int(residual is not None),
            TOP_K=schedule.top_k, COLUMNS=_COMBINE_COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """All kinds of weights and types; sums of 2 (Mixtral), 4 (Qwen 1.5) and 8 (Qwen 2 and 3) experts."""
    for dtype in ("fp16", "bf16"):
        for top_k in (2, 4, 8):
            yield _combine_case(arch, dtype, top_k)
        for kind in (None, *(kind for kind in KINDS if kind.group <= 32)):
            for regime, tile in _TILES[arch].items():
                yield _grouped_case(arch, dtype, kind, regime, tile)


def _combine_case(arch: int, dtype: str, top_k: int) -> CompileCase:
    sizes = ("num_columns", "y_stride", "residual_stride", "out_stride", "has_residual")
    types = {"y": f"*{dtype}", "slot_of_pair": "*i32", "routing": "*fp32", "residual": f"*{dtype}", "out": f"*{dtype}"}
    return CompileCase(
        name=f"grouped_gemm_combine/{dtype}/k{top_k}",
        kernel=_combine_kernel,
        arch=arch,
        signature={**types, **dict.fromkeys(sizes, "i32"), **dict.fromkeys(("TOP_K", "COLUMNS"), "constexpr")},
        constexprs={"TOP_K": top_k, "COLUMNS": _COMBINE_COLUMNS},
        num_warps=4,
        num_stages=3,
        aligned=(*types, *sizes[:-1]),
    )


def _grouped_case(arch: int, dtype: str, kind: GroupKind | None, regime: Regime, tile: Tile) -> CompileCase:
    constants = (kind or _DENSE).constants | ({} if kind else {"CHUNK": _DENSE_COLUMNS})
    constants |= {"IS_DENSE": kind is None, "ROWS": tile.rows, "TOKENS": tile.tokens}
    scale = f"*{dtype}" if kind is None else "*fp32" if kind.is_float else "*fp16"
    types = {"x": f"*{dtype}", "weights": "*u8" if kind else f"*{dtype}", "scales": scale, "minimums": scale}
    types |= {"pairs": "*i32", "tile_experts": "*i32", "out": f"*{dtype}"}
    names = _grouped_kernel.arg_names
    return CompileCase(
        name=f"grouped_gemm/{dtype}/{kind.name if kind else 'dense'}/{regime}",
        kernel=_grouped_kernel,
        arch=arch,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*types, "expert_rows", "all_rows", "num_columns", "x_stride", "out_stride"),
        expects=("HGMMA",) if arch >= 90 else ("HMMA",),
    )
