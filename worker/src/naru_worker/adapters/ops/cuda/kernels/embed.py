"""Rows of tables by id: embeddings, and learned positions that are added to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase

ELEMENTS_PER_PROGRAM = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # that of activations differs from step to step
def _rows_kernel(ids, table, num_rows, base, out, width, table_stride, base_stride, out_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    row = tl.minimum(tl.maximum(tl.load(ids + token), 0), num_rows - 1).to(tl.int64)
    value = tl.load(table + row * table_stride + at, mask=inside, other=0.0).to(tl.float32)
    if base is not None:
        value += tl.load(base + token * base_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def embed(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of `table` by id. Ids beyond the table are clamped.

    Args:
        ids: (M,) int32 or int64.
        table: (rows, width), last stride 1.
        out: (M, width), last stride 1, any float type; made like the table where it is None.
    """
    if out is None:
        out = torch.empty((len(ids), table.shape[1]), dtype=table.dtype, device=table.device)
    _launch(ids, table, None, out)
    return out


def add_rows(x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Adds to each row of x, in place, the row of `table` that its id names; returns x."""
    _launch(ids, table, x, x)
    return x


def _launch(ids: Tensor, table: Tensor, base: Tensor | None, out: Tensor) -> None:
    num_rows, width = out.shape
    if num_rows == 0:
        return
    _rows_kernel[(num_rows, triton.cdiv(width, ELEMENTS_PER_PROGRAM))](
        ids,
        table,
        table.shape[0],
        base,
        out,
        width,
        table.stride(0),
        0 if base is None else base.stride(0),
        out.stride(0),
        BLOCK=ELEMENTS_PER_PROGRAM,
        num_warps=_NUM_WARPS,
    )


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Lookups alone, and rows that are added."""
    for dtype in ("fp16", "bf16", "fp32"):
        for has_base in (False, True):
            signature = {"ids": "*i32", "table": f"*{dtype}", "num_rows": "i32", "base": f"*{dtype}"}
            signature |= {"out": f"*{dtype}", "width": "i32"}
            strides = ("table_stride", "base_stride", "out_stride")
            signature |= dict.fromkeys(strides, "i32") | {"BLOCK": "constexpr"}
            absent = () if has_base else ("base",)
            signature |= dict.fromkeys(absent, "constexpr")
            yield CompileCase(
                name=f"embed/{dtype}" + "/base" * has_base,
                kernel=_rows_kernel,
                arch=arch,
                signature=signature,
                constexprs=dict.fromkeys(absent) | {"BLOCK": ELEMENTS_PER_PROGRAM},
                num_warps=_NUM_WARPS,
                num_stages=3,
                aligned=(*[n for n, kind in signature.items() if kind.startswith("*")], "width", *strides),
            )
