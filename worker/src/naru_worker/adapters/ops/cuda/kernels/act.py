"""Activations between the two halves of an MLP, the result rounded to fp8 where the product behind it takes that."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.quantize import FP8_ARCHITECTURES, fp8_scale, to_fp8
from naru_worker.core.model_config import Activation

ELEMENTS_PER_PROGRAM = 1024
ELEMENTS_PER_TURN = 4096
"""With a scale for the whole row a program goes over it twice, in turns of so many elements."""
_NUM_WARPS = 4
_NUM_WARPS_OF_ROWS = 8
_KINDS: dict[Activation, int] = {"swiglu": 0, "gelu_tanh": 1, "gelu": 2}


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-tl.maximum(x, -80.0)))  # no more, so that nothing overflows


@triton.jit
def _activated(row, at, width, KIND: tl.constexpr):
    """Float32 results of one row at some places; 0 beyond `width`."""
    inside = at < width
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        up = tl.load(row + width + at, mask=inside, other=0.0).to(tl.float32)
        return x * _sigmoid(x) * up
    elif KIND == 1:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), and 2 sqrt(2 / pi) = 1.5957691216
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _rounded(row, at, width, KIND: tl.constexpr):
    """The same in the type that `row` has, which a pass of its own over the result would read."""
    return _activated(row, at, width, KIND).to(row.dtype.element_ty).to(tl.float32)


@triton.jit
def _act_kernel(x, out, used, width, x_stride, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if used is not None:
        if tl.load(used + row) < 0:
            return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _activated(x + row * x_stride, at, width, KIND)
    tl.store(out + row * out_stride + at, value.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _act_fp8_kernel(x, out, scales, width, x_stride, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        largest = tl.maximum(largest, tl.abs(_rounded(x + row * x_stride, first + tl.arange(0, BLOCK), width, KIND)))
    scale, factor = fp8_scale(tl.max(largest))
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = _rounded(x + row * x_stride, at, width, KIND)
        tl.store(out + row * out_stride + at, to_fp8(value * factor), mask=at < width)


def act(
    x: Tensor,
    kind: Activation,
    *,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    used: Tensor | None = None,
) -> Tensor:
    """Swiglu: silu(x[:, :n / 2]) * x[:, n / 2:]; the gelus: elementwise.

    Args:
        x: (M, n), last stride 1.
        kind: Which.
        out: (M, n / 2) of swiglu, (M, n) of the others, last stride 1; made like x (with `scales`: fp8 e4m3) if None.
        scales: (M,) float32, contiguous; with them the result is rounded to the type of x and then as `quantize_rows`
            does, and has to be multiplied by its row's.
        used: (M,) int32; rows where it is below 0 are neither read nor written. Not with `scales`.
    """
    assert scales is None or used is None
    num_rows, width = x.shape[0], x.shape[1] // 2 if kind == "swiglu" else x.shape[1]
    if out is None:
        dtype = x.dtype if scales is None else torch.float8_e4m3fn
        out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    if num_rows == 0:
        return out
    strides, constants = (x.stride(0), out.stride(0)), {"KIND": _KINDS[kind]}
    if scales is None:
        grid = (num_rows, triton.cdiv(width, ELEMENTS_PER_PROGRAM))
        _act_kernel[grid](x, out, used, width, *strides, **constants, BLOCK=ELEMENTS_PER_PROGRAM, num_warps=_NUM_WARPS)
    else:
        _act_fp8_kernel[(num_rows,)](
            x, out, scales, width, *strides, **constants, BLOCK=ELEMENTS_PER_TURN, num_warps=_NUM_WARPS_OF_ROWS
        )
    return out


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """Every kind and type; rows of experts, of which some are unused, are swiglu's."""
    for dtype in ("fp16", "bf16"):
        yield _act_case(arch, dtype, "swiglu", has_used=True)
    for kind, number in _KINDS.items():
        for dtype in ("fp16", "bf16", "fp32"):
            yield _act_case(arch, dtype, kind, has_used=False)
            if arch in FP8_ARCHITECTURES and dtype != "fp32":
                yield CompileCase(
                    name=f"act/{dtype}/{kind}/fp8",
                    kernel=_act_fp8_kernel,
                    arch=arch,
                    signature=_signature(dtype, "fp8e4nv", {"scales": "*fp32"}),
                    constexprs={"KIND": number, "BLOCK": ELEMENTS_PER_TURN},
                    num_warps=_NUM_WARPS_OF_ROWS,
                    num_stages=3,
                    aligned=("x", "out", "scales", "width", "x_stride", "out_stride"),
                )


def _act_case(arch: int, dtype: str, kind: Activation, *, has_used: bool) -> CompileCase:
    constants = {"KIND": _KINDS[kind], "BLOCK": ELEMENTS_PER_PROGRAM}
    used = {"used": "*i32" if has_used else "constexpr"}
    return CompileCase(
        name=f"act/{dtype}/{kind}" + "/used" * has_used,
        kernel=_act_kernel,
        arch=arch,
        signature=_signature(dtype, dtype, used),
        constexprs=constants if has_used else {"used": None, **constants},
        num_warps=_NUM_WARPS,
        num_stages=3,
        aligned=("x", "out", *(("used",) if has_used else ()), "width", "x_stride", "out_stride"),
    )


def _signature(dtype: str, out: str, third: dict[str, str]) -> dict[str, str]:
    signature = {"x": f"*{dtype}", "out": f"*{out}", **third}
    signature |= dict.fromkeys(("width", "x_stride", "out_stride"), "i32")
    return signature | {"KIND": "constexpr", "BLOCK": "constexpr"}
