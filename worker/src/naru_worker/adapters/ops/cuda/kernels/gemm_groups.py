"""y = x @ W.T (+ bias) (+ residual) with W quantized in groups and x of 16 bits.

Two ways, which the caller chooses by the kind of the rows: *generated* rows are few, and the weight is streamed through
many programs that share the columns of a row; *prompt* rows are many, and tiles are dequantized for the tensor cores.
Within one way the order of additions of one output depends on the shape of the weight alone: neither the number of
rows nor their mates change an answer. Weights come as the left operand of the tensor cores, which takes them out of
registers right after they were unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.group_layout import KINDS, GroupKind, GroupRows, quants_to_floats

Regime = Literal["generated", "prompt"]


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes: `rows` of the weight for `tokens` rows of x."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


_GENERATED: dict[int, dict[int, Tile]] = {
    arch: {16: Tile(128, 16, 4, stages), 32: Tile(64, 32, 4, stages), 64: Tile(64, 64, 4, 3)}
    for arch, stages in ((80, 5), (89, 5), (90, 6))
}
"""By architecture and the most tokens. All of them add in the same order with the same instructions."""
_PROMPT: dict[int, dict[int, Tile]] = {
    80: {64: Tile(64, 64, 4, 3), 128: Tile(128, 128, 8, 3)},
    89: {64: Tile(64, 64, 4, 3), 128: Tile(128, 128, 8, 2)},
    90: {64: Tile(64, 64, 4, 4), 128: Tile(128, 128, 8, 3)},
}
_PROGRAMS = {80: 324, 89: 426, 90: 396}
"""Programs that fill a GPU, three on each multiprocessor: few rows of a weight are shared by as many."""
_LEAST_COLUMNS = 256
"""Columns that are worth a program of their own."""
_REDUCE_COLUMNS = 256


@triton.jit
def _finish(
    total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Adds bias and residual to (rows, tokens) sums, and writes them turned."""
    inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    to = out + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _group_at(values, group, rows, num_rows):
    """Scales or minimums of one group, (rows, 1), float32."""
    return tl.load(values + group * num_rows + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _tokens_at(x, tokens, first, num_tokens, num_columns, x_stride, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """(SIZE, tokens) of x from a column on; zeros beyond the last."""
    columns = first + tl.arange(0, SIZE)
    inside = (tokens < num_tokens)[:, None]
    if not WHOLE:
        inside = inside & (columns < num_columns)[None, :]
    return tl.trans(tl.load(x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=inside, other=0.0))


@triton.jit
def _generated_kernel(
    x, quants, scales, minimums, bias, residual, out, partial,
    num_tokens, num_rows, num_columns, num_chunks, chunks_a_split, x_stride, residual_stride, out_stride,
    BITS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_SPLIT: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(1) * chunks_a_split
    for chunk in range(first, tl.minimum(first + chunks_a_split, num_chunks)):
        at = (chunk * num_rows + rows.to(tl.int64)[:, None]) * CHUNK + tl.arange(0, CHUNK)[None, :]
        packed = tl.load(quants + at, mask=(rows < num_rows)[:, None], other=0)
        # Integers are multiplied as they are, exactly; a group's sum is scaled afterwards.
        for half in tl.static_range(8 // BITS):
            column = (chunk * (8 // BITS) + half) * CHUNK
            part = _tokens_at(x, tokens, column, num_tokens, num_columns, x_stride, CHUNK, WHOLE)
            integers = packed
            if BITS == 4:
                integers = (packed >> (4 * half)) & 15
            values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype)
            if GROUP > 0:
                sums = tl.dot(values, part, input_precision="ieee")
                total += sums * _group_at(scales, column // GROUP, rows, num_rows)
            else:
                total = tl.dot(values, part, total, input_precision="ieee")
            if HAS_MINIMUM:
                # The sums of x, once more by tensor cores: nothing has to pass between threads.
                sums = tl.dot(tl.full((ROWS, CHUNK), 1.0, dtype), part, input_precision="ieee")
                total += sums * _group_at(minimums, column // GROUP, rows, num_rows)
    if GROUP == 0:
        total *= _group_at(scales, 0, rows, num_rows)
    if IS_SPLIT:
        inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
        line = tl.program_id(1).to(tl.int64) * num_tokens + tokens
        tl.store(partial + line[None, :] * num_rows + rows[:, None], total, mask=inside)
    else:
        _finish(
            total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
            HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _reduce_kernel(
    partial, bias, residual, out, num_tokens, num_rows, num_splits, residual_stride, out_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(num_splits):
        total += tl.load(partial + (split * num_tokens + token) * num_rows + rows, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * residual_stride + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + rows, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prompt_kernel(
    x, quants, scales, minimums, bias, residual, out,
    num_tokens, num_rows, num_columns, num_chunks, x_stride, residual_stride, out_stride,
    BITS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    # Neighbours share the rows of the weight: it is read from memory once.
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for chunk in range(num_chunks):
        at = (chunk * num_rows + rows.to(tl.int64)[:, None]) * CHUNK + tl.arange(0, CHUNK)[None, :]
        packed = tl.load(quants + at, mask=(rows < num_rows)[:, None], other=0)
        for half in tl.static_range(8 // BITS):
            column = (chunk * (8 // BITS) + half) * CHUNK
            part = _tokens_at(x, tokens, column, num_tokens, num_columns, x_stride, CHUNK, WHOLE)
            integers = packed
            if BITS == 4:
                integers = (packed >> (4 * half)) & 15
            if GROUP > 0:
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, tl.float32)
                values *= _group_at(scales, column // GROUP, rows, num_rows)
                if HAS_MINIMUM:
                    values += _group_at(minimums, column // GROUP, rows, num_rows)
                values = values.to(dtype)
            else:
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype)
            total = tl.dot(values, part, total, input_precision="ieee")
    if GROUP == 0:
        total *= _group_at(scales, 0, rows, num_rows)
    _finish(
        total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def num_splits(kind: GroupKind, num_rows: int, num_columns: int, arch: int) -> int:
    """Programs that share the columns of a row of the weight among generated tokens: of its shape alone."""
    wanted = _PROGRAMS[arch] // -(-num_rows // _GENERATED[arch][16].rows)
    wanted = min(max(1, wanted), max(1, num_columns // _LEAST_COLUMNS))
    chunks = kind.num_chunks(num_columns)
    return -(-chunks // -(-chunks // wanted))


def gemm_groups(
    x: Tensor,
    weight: GroupRows,
    *,
    regime: Regime,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    arch: int = 80,
) -> Tensor:
    """X @ W.T (+ bias) (+ residual).

    Args:
        x: (M, num_columns), 16 bits (float32 under the interpreter); rows may be strided.
        weight: Of the same device.
        regime: The kind of the rows: which way to compute.
        bias: (num_rows,), any float type.
        residual: (M, num_rows), the type of x; rows may be strided. May be `out`.
        out: (M, num_rows), the type of x, mutated; rows may be strided: columns of a wider output. Made when None.
        arch: One of `ARCHITECTURES`.

    Source: split-K as in Stream-K (Osama et al., 2023), with a fixed split and sums kept apart for determinism;
    weights as the left operand out of registers as in Machete (vLLM) and CUTLASS's mixed-input GEMM.
    """
    assert x.shape[1] == weight.num_columns and x.stride(1) == 1
    if out is None:
        out = torch.empty((len(x), weight.num_rows), dtype=x.dtype, device=x.device)
    if len(x) == 0:
        return out
    (_generated if regime == "generated" else _prompt)(x, weight, bias, residual, out, arch)
    return out


def _tile(tiles: dict[int, Tile], num_tokens: int) -> Tile:
    return tiles[next((most for most in tiles if num_tokens <= most), max(tiles))]


def _constants(kind: GroupKind, columns: int, bias: Tensor | None, residual: Tensor | None) -> dict[str, Any]:
    return {
        **kind.constants,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "WHOLE": columns % kind.chunk_columns == 0,
    }


def _generated(
    x: Tensor, weight: GroupRows, bias: Tensor | None, residual: Tensor | None, out: Tensor, arch: int
) -> None:
    kind, tokens, rows = weight.kind, len(x), weight.num_rows
    tile = _tile(_GENERATED[arch], tokens)
    splits = num_splits(kind, rows, weight.num_columns, arch)
    chunks = kind.num_chunks(weight.num_columns)
    residual_stride = 0 if residual is None else residual.stride(0)
    partial = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device) if splits > 1 else out
    _generated_kernel[(triton.cdiv(rows, tile.rows), splits, triton.cdiv(tokens, tile.tokens))](
        x, weight.quants, weight.scales, _or(weight.minimums, out), _or(bias, out), _or(residual, out), out, partial,
        tokens, rows, weight.num_columns, chunks, triton.cdiv(chunks, splits), x.stride(0), residual_stride,
        out.stride(0), **_constants(kind, weight.num_columns, bias, residual), IS_SPLIT=splits > 1,
        ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _reduce_kernel[(triton.cdiv(rows, _REDUCE_COLUMNS), tokens)](
            partial, _or(bias, out), _or(residual, out), out, tokens, rows, splits, residual_stride, out.stride(0),
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ROWS=_REDUCE_COLUMNS, num_warps=4,
        )  # fmt: skip


def _prompt(x: Tensor, weight: GroupRows, bias: Tensor | None, residual: Tensor | None, out: Tensor, arch: int) -> None:
    kind, tokens, rows = weight.kind, len(x), weight.num_rows
    tile = _tile(_PROMPT[arch], tokens)
    _prompt_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, tile.rows))](
        x, weight.quants, weight.scales, _or(weight.minimums, out), _or(bias, out), _or(residual, out), out,
        tokens, rows, weight.num_columns, kind.num_chunks(weight.num_columns), x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0),
        **_constants(kind, weight.num_columns, bias, residual),
        ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer is needed even where it is never read."""
    return other if tensor is None else tensor


_POINTERS = ("x", "quants", "scales", "minimums", "bias", "residual", "out")
_ALIGNED_SIZES = ("num_rows", "num_columns", "x_stride", "residual_stride", "out_stride")


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both ways for all kinds of weights and types; with residual (and bias where it comes) as layers have them."""
    for dtype in ("fp16", "bf16"):
        for kind in KINDS:
            for most in _GENERATED[arch]:
                yield _generated_case(arch, dtype, kind, most)
            for most in _PROMPT[arch]:
                yield _prompt_case(arch, dtype, kind, most)
        yield CompileCase(
            name=f"gemm_groups_reduce/{dtype}",
            kernel=_reduce_kernel,
            arch=arch,
            signature={
                **{"partial": "*fp32", "bias": f"*{dtype}", "residual": f"*{dtype}", "out": f"*{dtype}"},
                **dict.fromkeys(("num_tokens", "num_rows", "num_splits", "residual_stride", "out_stride"), "i32"),
                **dict.fromkeys(("HAS_BIAS", "HAS_RESIDUAL", "ROWS"), "constexpr"),
            },
            constexprs={"HAS_BIAS": True, "HAS_RESIDUAL": True, "ROWS": _REDUCE_COLUMNS},
            num_warps=4,
            num_stages=3,
            aligned=("partial", "bias", "residual", "out", "num_rows", "residual_stride", "out_stride"),
        )


def _case_constants(kind: GroupKind, tile: Tile) -> dict[str, Any]:
    something = torch.empty(0)
    return {
        **_constants(kind, kind.chunk_columns, something, something),
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
    }


def _pointers(dtype: str, kind: GroupKind) -> dict[str, str]:
    scale = "*fp16" if kind.group else "*fp32"
    types = {"quants": "*u8", "scales": scale, "minimums": scale}
    return {name: types.get(name, f"*{dtype}") for name in _POINTERS}


def _generated_case(arch: int, dtype: str, kind: GroupKind, most: int) -> CompileCase:
    tile = _GENERATED[arch][most]
    constants = _case_constants(kind, tile) | {"IS_SPLIT": most == 16}
    sizes = ("num_tokens", "num_rows", "num_columns", "num_chunks", "chunks_a_split", "x_stride", "residual_stride")
    order = [name for name in _generated_kernel.arg_names if name in constants]
    return CompileCase(
        name=f"gemm_groups_generated/{dtype}/{kind.name}/m{most}",
        kernel=_generated_kernel,
        arch=arch,
        signature={
            **_pointers(dtype, kind),
            "partial": "*fp32",
            **dict.fromkeys((*sizes, "out_stride"), "i32"),
            **dict.fromkeys(order, "constexpr"),
        },
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*_POINTERS, "partial", *_ALIGNED_SIZES),
        expects=("HGMMA" if arch >= 90 else "HMMA",),
    )


def _prompt_case(arch: int, dtype: str, kind: GroupKind, most: int) -> CompileCase:
    tile = _PROMPT[arch][most]
    constants = _case_constants(kind, tile)
    sizes = ("num_tokens", "num_rows", "num_columns", "num_chunks", "x_stride", "residual_stride", "out_stride")
    order = [name for name in _prompt_kernel.arg_names if name in constants]
    return CompileCase(
        name=f"gemm_groups_prompt/{dtype}/{kind.name}/m{most}",
        kernel=_prompt_kernel,
        arch=arch,
        signature={**_pointers(dtype, kind), **dict.fromkeys(sizes, "i32"), **dict.fromkeys(order, "constexpr")},
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=(*_POINTERS, *_ALIGNED_SIZES),
        expects=("HGMMA" if arch >= 90 else "HMMA", "LDGSTS"),
    )
