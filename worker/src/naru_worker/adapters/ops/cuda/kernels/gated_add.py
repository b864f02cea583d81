"""Adds rows that are weighted by a gate of their own: what a token gets of an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

_BLOCK = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=("has_residual",))
def _gated_add_kernel(
    x, h, gate, residual, out, num_columns, x_stride, h_stride, residual_stride, out_stride, has_residual,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        given = tl.load(h + row * h_stride + at, mask=at < num_columns, other=0.0).to(tl.float32)
        sums += given * tl.load(gate + at, mask=at < num_columns, other=0.0)
    # No more than 80, so that nothing overflows.
    weight = 1.0 / (1.0 + tl.exp(-tl.maximum(tl.sum(sums, axis=0), -80.0)))
    for first in range(0, num_columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = weight * tl.load(x + row * x_stride + at, mask=at < num_columns, other=0.0).to(tl.float32)
        before = residual + row * residual_stride + at
        total += tl.load(before, mask=at < num_columns * has_residual, other=0.0).to(tl.float32)
        tl.store(out + row * out_stride + at, total.to(out.dtype.element_ty), mask=at < num_columns)


def gated_add(
    x: Tensor, h: Tensor, gate: Tensor, *, residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """sigmoid(h @ gate) * x (+ residual), row by row.

    Args:
        x: (M, num_columns), last stride 1.
        h: (M, num_columns), last stride 1.
        gate: (num_columns,) float32.
        residual: (M, num_columns), last stride 1. May be `out`.
        out: (M, num_columns), last stride 1, mutated; made like x when None.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _gated_add_kernel[(len(x),)](
            x, h, gate, out if residual is None else residual, out, x.shape[1], x.stride(0), h.stride(0),
            out.stride(0) if residual is None else residual.stride(0), out.stride(0), int(residual is not None),
            BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Each type of activations."""
    for dtype in ("fp16", "bf16"):
        types = {n: "*fp32" if n == "gate" else f"*{dtype}" for n in ("x", "h", "gate", "residual", "out")}
        sizes = ("num_columns", "x_stride", "h_stride", "residual_stride", "out_stride")
        yield CompileCase(
            name=f"gated_add/{dtype}",
            kernel=_gated_add_kernel,
            arch=arch,
            signature={**types, **dict.fromkeys((*sizes, "has_residual"), "i32"), "BLOCK": "constexpr"},
            constexprs={"BLOCK": _BLOCK},
            num_warps=_NUM_WARPS,
            num_stages=3,
            aligned=(*types, *sizes),
        )
