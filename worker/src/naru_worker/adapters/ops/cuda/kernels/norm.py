"""RMSNorm and LayerNorm of rows, the result rounded to fp8 where the product behind it takes that.

Residuals are added by the products before it, which pass over their results anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.quantize import FP8_ARCHITECTURES, fp8_scale, to_fp8
from naru_worker.core.model_config import NormKind

_WARPS = {64: 1, 128: 1, 256: 1, 512: 1, 1024: 2, 2048: 4, 4096: 8, 8192: 8, 16384: 16, 32768: 32}
"""Warps by the width of a row, rounded up: a row lies in the registers of one program."""


@triton.jit
def _norm_kernel(
    x,
    weight,
    bias,
    out,
    scales,
    eps,
    width,
    x_stride,
    out_stride,
    IS_RMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if not IS_RMS:
        value = tl.where(inside, value - tl.sum(value) / width, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / width + eps)
    value = value * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if scales is not None:
        value = value.to(x.dtype.element_ty).to(tl.float32)  # what a pass of its own over the result would read
        scale, factor = fp8_scale(tl.max(tl.abs(value)))
        tl.store(scales + row, scale)
        tl.store(out + row * out_stride + at, to_fp8(value * factor), mask=inside)
    else:
        tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: NormKind,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The norm of each row of x, as `out`.

    Args:
        x: (M, width), last stride 1.
        weight: (width,), any float type.
        bias: (width,), any float type, added at last.
        eps: Added to the mean square, or variance.
        kind: "rms" or "layer".
        out: (M, width), last stride 1, of any float type; made like x (with `scales`: fp8 e4m3) where it is None.
        scales: (M,) float32, contiguous; with them the result is rounded to the type of x and then as `quantize_rows`
            does, and has to be multiplied by its row's.
    """
    num_rows, width = x.shape
    if out is None:
        out = torch.empty_like(x, dtype=x.dtype if scales is None else torch.float8_e4m3fn)
    if num_rows == 0:
        return out
    block = max(64, triton.next_power_of_2(width))
    _norm_kernel[(num_rows,)](
        x,
        weight,
        bias,
        out,
        scales,
        eps,
        width,
        x.stride(0),
        out.stride(0),
        IS_RMS=kind == "rms",
        BLOCK=block,
        num_warps=_WARPS[block],
    )
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every kind and every width, with and without a bias (LayerNorm's) and rounding to fp8."""
    quantizes = (False, True) if arch in FP8_ARCHITECTURES else (False,)
    for dtype in ("fp16", "bf16"):
        for is_rms in (True, False):
            for quantize in quantizes:
                for block in (512, 1024, 2048, 4096, 8192, 16384):
                    yield _case(arch, dtype, block, is_rms, quantize=quantize)
    yield _case(arch, "fp32", 4096, True, quantize=False)


def _case(arch: int, dtype: str, block: int, is_rms: bool, *, quantize: bool) -> CompileCase:
    has = {"bias": not is_rms, "scales": quantize}
    signature = {"x": f"*{dtype}", "weight": "*fp32", "bias": "*fp32"}
    signature |= {"out": "*fp8e4nv" if quantize else f"*{dtype}", "scales": "*fp32", "eps": "fp32"}
    signature |= dict.fromkeys(("width", "x_stride", "out_stride"), "i32")
    signature |= {name: "constexpr" for name, is_there in has.items() if not is_there}
    constants: dict[str, Any] = {name: None for name, is_there in has.items() if not is_there}
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    name = f"norm/{dtype}/{'rms' if is_rms else 'layer'}/w{block}" + "/fp8" * quantize
    return CompileCase(
        name=name,
        kernel=_norm_kernel,
        arch=arch,
        signature=signature | {"IS_RMS": "constexpr", "BLOCK": "constexpr"},
        constexprs=constants | {"IS_RMS": is_rms, "BLOCK": block},
        num_warps=_WARPS[block],
        num_stages=3,
        aligned=(*aligned, "width", "x_stride", "out_stride"),
    )
