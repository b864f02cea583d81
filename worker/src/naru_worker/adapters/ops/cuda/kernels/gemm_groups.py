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
    89: {64: Tile(64, 64, 4, 2), 128: Tile(128, 128, 8, 2)},
    90: {64: Tile(64, 64, 4, 4), 128: Tile(128, 128, 8, 3)},
}
_PROGRAMS = {80: 324, 89: 426, 90: 396}
"""Programs that fill a GPU, three on each multiprocessor: few rows of a weight are shared by as many."""
_LEAST_COLUMNS = 256
"""Columns that are worth a program of their own."""
_REDUCE_COLUMNS = 256
_CHANGING = ("num_tokens", "num_chunks", "chunks_a_split", "num_splits", "group_bits", "has_bias", "has_residual")
"""Numbers that differ between steps or layers: no code is made for a one or a multiple of 16 among them."""


@triton.jit
def _finish(
    total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
    has_bias, has_residual,
):  # fmt: skip
    """Adds bias and residual to (rows, tokens) sums, and writes them turned."""
    inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
    # Flags, not constants: they cost a predicate here, and a code for each of their combinations there.
    total += tl.load(bias + rows, mask=rows < num_rows * has_bias, other=0.0).to(tl.float32)[:, None]
    at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
    total += tl.load(residual + at, mask=inside & (rows < num_rows * has_residual)[:, None], other=0.0).to(tl.float32)
    to = out + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _group_at(values, group, rows, num_rows):
    """Scales or minimums of one group, (rows, 1), float32."""
    return tl.load(values + group * num_rows + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _tokens_at(x, tokens, first, num_tokens, num_columns, x_stride, SIZE: tl.constexpr):
    """(SIZE, tokens) of x from a column on; zeros beyond the last."""
    columns = first + tl.arange(0, SIZE)
    inside = (tokens < num_tokens)[:, None] & (columns < num_columns)[None, :]
    return tl.trans(tl.load(x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :], mask=inside, other=0.0))


@triton.jit(do_not_specialize=_CHANGING)
def _generated_kernel(
    x, quants, scales, minimums, bias, residual, out, partial,
    num_tokens, num_rows, num_columns, num_chunks, chunks_a_split, group_bits, x_stride, residual_stride, out_stride,
    has_bias, has_residual,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, IS_ROW: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    dtype: tl.constexpr = x.dtype.element_ty
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(1) * chunks_a_split
    for chunk in range(first, tl.minimum(first + chunks_a_split, num_chunks)):
        at = (chunk * num_rows + rows.to(tl.int64)[:, None]) * CHUNK + tl.arange(0, CHUNK)[None, :]
        packed = tl.load(quants + at, mask=(rows < num_rows)[:, None], other=0)
        for half in tl.static_range(8 // BITS):
            column = (chunk * (8 // BITS) + half) * CHUNK
            part = _tokens_at(x, tokens, column, num_tokens, num_columns, x_stride, CHUNK)
            integers = packed
            if BITS == 4:
                integers = (packed >> (4 * half)) & 15
            if IS_ROW:
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype)
                total = tl.dot(values, part, total, input_precision="ieee")
            elif HAS_MINIMUM:
                # A product with the minimums, of the sums of x, would cost more than rounded weights save.
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, tl.float32)
                values *= _group_at(scales, column >> group_bits, rows, num_rows)
                values += _group_at(minimums, column >> group_bits, rows, num_rows)
                total = tl.dot(values.to(dtype), part, total, input_precision="ieee")
            else:
                # Integers and 8-bit floats are multiplied as they are, exactly; a group's sum is scaled afterwards.
                sums = tl.dot(quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype), part, input_precision="ieee")
                total += sums * _group_at(scales, column >> group_bits, rows, num_rows)
    if IS_ROW:
        total *= _group_at(scales, 0, rows, num_rows)
    if IS_SPLIT:
        inside = (rows < num_rows)[:, None] & (tokens < num_tokens)[None, :]
        line = tl.program_id(1).to(tl.int64) * num_tokens + tokens
        tl.store(partial + line[None, :] * num_rows + rows[:, None], total, mask=inside)
    else:
        _finish(
            total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
            has_bias, has_residual,
        )  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def _reduce_kernel(
    partial, bias, residual, out, num_tokens, num_rows, num_splits, residual_stride, out_stride,
    has_bias, has_residual, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(num_splits):
        total += tl.load(partial + (split * num_tokens + token) * num_rows + rows, mask=inside, other=0.0)
    total += tl.load(bias + rows, mask=rows < num_rows * has_bias, other=0.0).to(tl.float32)
    at = token * residual_stride + rows
    total += tl.load(residual + at, mask=rows < num_rows * has_residual, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + rows, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def _prompt_kernel(
    x, quants, scales, minimums, bias, residual, out,
    num_tokens, num_rows, num_columns, num_chunks, group_bits, x_stride, residual_stride, out_stride,
    has_bias, has_residual,
    BITS: tl.constexpr, CHUNK: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr, IS_ROW: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
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
            part = _tokens_at(x, tokens, column, num_tokens, num_columns, x_stride, CHUNK)
            integers = packed
            if BITS == 4:
                integers = (packed >> (4 * half)) & 15
            if not IS_ROW:
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, tl.float32)
                values *= _group_at(scales, column >> group_bits, rows, num_rows)
                if HAS_MINIMUM:
                    values += _group_at(minimums, column >> group_bits, rows, num_rows)
                values = values.to(dtype)
            else:
                values = quants_to_floats(integers, BITS, ZERO, IS_FLOAT, dtype)
            total = tl.dot(values, part, total, input_precision="ieee")
    if IS_ROW:
        total *= _group_at(scales, 0, rows, num_rows)
    _finish(
        total, bias, residual, out, tokens, rows, num_tokens, num_rows, residual_stride, out_stride,
        has_bias, has_residual,
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
        x, weight.quants, weight.scales, _or(weight.minimums, weight.scales), _or(bias, out), _or(residual, out), out,
        partial, tokens, rows, weight.num_columns, chunks, triton.cdiv(chunks, splits), kind.group_bits, x.stride(0),
        residual_stride, out.stride(0), int(bias is not None), int(residual is not None), **kind.constants,
        IS_SPLIT=splits > 1, ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        _reduce_kernel[(triton.cdiv(rows, _REDUCE_COLUMNS), tokens)](
            partial, _or(bias, out), _or(residual, out), out, tokens, rows, splits, residual_stride, out.stride(0),
            int(bias is not None), int(residual is not None), ROWS=_REDUCE_COLUMNS, num_warps=4,
        )  # fmt: skip


def _prompt(x: Tensor, weight: GroupRows, bias: Tensor | None, residual: Tensor | None, out: Tensor, arch: int) -> None:
    kind, tokens, rows = weight.kind, len(x), weight.num_rows
    tile = _tile(_PROMPT[arch], tokens)
    _prompt_kernel[(triton.cdiv(tokens, tile.tokens), triton.cdiv(rows, tile.rows))](
        x, weight.quants, weight.scales, _or(weight.minimums, weight.scales), _or(bias, out), _or(residual, out), out,
        tokens, rows, weight.num_columns, kind.num_chunks(weight.num_columns), kind.group_bits, x.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), int(bias is not None), int(residual is not None),
        **kind.constants,
        ROWS=tile.rows, TOKENS=tile.tokens, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer is needed even where it is never read."""
    return other if tensor is None else tensor


_POINTERS = ("x", "quants", "scales", "minimums", "bias", "residual", "out")
_ALIGNED_SIZES = ("num_rows", "num_columns", "x_stride", "residual_stride", "out_stride")


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Both ways for all kinds of weights and types; groups of 64 and 128 run as those of 32 do."""
    for dtype in ("fp16", "bf16"):
        yield _case("gemm_groups_reduce", _reduce_kernel, arch, dtype, {"ROWS": _REDUCE_COLUMNS}, Tile(0, 0, 4, 3))
        for kind in (kind for kind in KINDS if kind.group <= 32):
            for most, tile in _GENERATED[arch].items():
                for is_split in (True, False):
                    name = f"gemm_groups_generated/{kind.name}/m{most}" + ("" if is_split else "-unsplit")
                    constants = kind.constants | {"IS_SPLIT": is_split}
                    yield _case(name, _generated_kernel, arch, dtype, constants, tile)
            for most, tile in _PROMPT[arch].items():
                name = f"gemm_groups_prompt/{kind.name}/m{most}"
                yield _case(name, _prompt_kernel, arch, dtype, kind.constants, tile)


def _case(name: str, kernel: Any, arch: int, dtype: str, constants: dict[str, Any], tile: Tile) -> CompileCase:
    scale = "*fp32" if constants.get("IS_FLOAT") else "*fp16"
    types = {"quants": "*u8", "scales": scale, "minimums": scale, "partial": "*fp32"}
    if constants.get("IS_SPLIT") is False:
        types["partial"] = f"*{dtype}"
    types |= {pointer: types.get(pointer, f"*{dtype}") for pointer in _POINTERS}
    if tile.rows:
        constants = constants | {"ROWS": tile.rows, "TOKENS": tile.tokens}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    return CompileCase(
        name=name.replace("/", f"/{dtype}/", 1) if "/" in name else f"{name}/{dtype}",
        kernel=kernel,
        arch=arch,
        signature=signature,
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=tuple(n for n in signature if n in (*_POINTERS, "partial", *_ALIGNED_SIZES)),
        expects=() if not tile.rows else ("HGMMA",) if arch >= 90 else ("HMMA",),
    )
