"""y = x @ W.T (+ bias) (+ residual) with 8-bit floats (e4m3) on both sides, by torch's scaled matrix product.

Rows of x are quantized as they come, each by its largest value: here, or by the norm or activation that makes them.
Rows of W are, beforehand. The device must multiply 8-bit floats (`fp8_obstacle` tells); where it does not, the same
weights are multiplied by `gemm_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.quantize import FP8_ARCHITECTURES, FP8_MAX, fp8_scale, to_fp8

_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16
_MOST_COLUMNS = 32768
_FINISH_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix of 8-bit floats: weights, (out_features, in_features), or activations, (M, in_features)."""

    values: Tensor
    """(num_rows, num_columns), float8_e4m3fn, contiguous."""
    scales: Tensor
    """(num_rows,), float32: number = value * scale."""

    @staticmethod
    def empty(num_rows: int, num_columns: int, device: torch.device) -> Fp8Rows:
        """To be filled."""
        values = torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=device)
        return Fp8Rows(values, torch.empty(num_rows, dtype=torch.float32, device=device))

    @property
    def num_rows(self) -> int:
        """out_features, or M."""
        return int(self.values.shape[0])

    @property
    def num_columns(self) -> int:
        """in_features."""
        return int(self.values.shape[1])

    def placed(self, place: Callable[[Tensor], Tensor]) -> Fp8Rows:
        """The same with each tensor where `place` puts it: on a device, or into an arena."""
        return Fp8Rows(place(self.values), place(self.scales))


def fp8_obstacle(capability: tuple[int, int], num_rows: int, num_columns: int) -> str | None:
    """Why a device cannot multiply 8-bit floats on both sides, as a sentence for people; None when it can.

    Args:
        capability: The device's compute capability.
        num_rows: Of the weight, as many as one product has.
        num_columns: Of the weight.
    """
    if capability < _LEAST_CAPABILITY:
        return (
            f"compute capability {capability[0]}.{capability[1]} has no tensor cores for 8-bit floats (8.9 and newer "
            "have): FP8 weights are multiplied with 16-bit activations"
        )
    if not hasattr(torch, "_scaled_mm"):
        return "this torch has no scaled matrix product: FP8 weights are multiplied with 16-bit activations"
    if num_rows % _MULTIPLE or num_columns % _MULTIPLE or num_columns > _MOST_COLUMNS:
        return (
            f"a weight of {num_rows} rows and {num_columns} columns is no multiple of {_MULTIPLE}, or wider than "
            f"{_MOST_COLUMNS}: it is multiplied with 16-bit activations"
        )
    return None


def quantize_weight(values: Tensor) -> Fp8Rows:
    """8-bit floats of a float matrix (num_rows, num_columns), with a scale a row; on its device."""
    scales = values.abs().amax(dim=1).float().clamp(min=1e-12) / FP8_MAX
    return Fp8Rows((values.float() / scales[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales)


@triton.jit
def _quantize_kernel(x, values, scales, num_columns, x_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < num_columns
    given = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale, factor = fp8_scale(tl.max(tl.abs(given), axis=0))
    tl.store(values + row * num_columns + columns, to_fp8(given * factor), mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=("has_bias", "has_residual"))
def _finish_kernel(
    product, x_scales, scales, bias, residual, out, num_rows, residual_stride, out_stride,
    has_bias, has_residual, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < num_rows
    total = tl.load(product + token * num_rows + rows, mask=inside, other=0.0)
    total = total * tl.load(x_scales + token) * tl.load(scales + rows, mask=inside, other=0.0)
    total += tl.load(bias + rows, mask=rows < num_rows * has_bias, other=0.0).to(tl.float32)
    at = token * residual_stride + rows
    total += tl.load(residual + at, mask=rows < num_rows * has_residual, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + rows, total.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """8-bit floats of x, (M, K), a float matrix whose rows may be strided."""
    tokens, columns = x.shape
    rows = Fp8Rows.empty(tokens, columns, x.device)
    size = triton.next_power_of_2(columns)
    if tokens:
        _quantize_kernel[(tokens,)](
            x, rows.values, rows.scales, columns, x.stride(0), COLUMNS=size, num_warps=_warps(size)
        )  # fmt: skip
    return rows


def fp8_linear(
    x: Tensor | Fp8Rows,
    weight: Fp8Rows,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """X @ W.T (+ bias) (+ residual).

    The library multiplies, and gives float32; scales, bias and residual come on in one pass after it. So it is the same
    on all devices and for all types, while products that scale by row are for some only.

    Args:
        x: (M, num_columns), 16 bits (float32 on the CPU), rows may be strided; or quantized already.
        weight: On the same device, which `fp8_obstacle` has nothing against.
        bias: (num_rows,), any float type.
        residual: (M, num_rows), the type of `out`, which it may be.
        out: (M, num_rows), any float type, mutated; rows may be strided. None: made like x, which must
            not be quantized then.
    """
    if out is None:
        assert isinstance(x, Tensor), "8-bit floats do not say what their product is to be"
        out = torch.empty((len(x), weight.num_rows), dtype=x.dtype, device=x.device)
    if len(out) == 0:
        return out
    rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
    product = _product(rows.values, weight.values)
    grid = (len(out), triton.cdiv(weight.num_rows, _FINISH_COLUMNS))
    _finish_kernel[grid](
        product, rows.scales, weight.scales, out if bias is None else bias, out if residual is None else residual, out,
        weight.num_rows, 0 if residual is None else residual.stride(0), out.stride(0),
        int(bias is not None), int(residual is not None), COLUMNS=_FINISH_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def product_bytes(num_tokens: int, num_rows: int) -> int:
    """Of what `fp8_linear` multiplies into, for a weight of so many rows, until it is finished."""
    return num_tokens * num_rows * torch.float32.itemsize


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A @ b.T of 8-bit floats, float32."""
    if not a.is_cuda:
        return a.float() @ b.float().T
    one = torch.ones((), dtype=torch.float32, device=a.device)
    product: Tensor = torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return product


def _warps(columns: int) -> int:
    return max(1, min(16, columns // 512))


def compile_cases(arch: int) -> Iterator[CompileCase]:
    """The passes before and after the product, where devices multiply 8-bit floats."""
    if arch not in FP8_ARCHITECTURES:
        return
    for dtype in ("fp16", "bf16"):
        for columns in (1024, 2048, 4096, 8192, 16384, _MOST_COLUMNS):
            yield CompileCase(
                name=f"fp8_quantize_rows/{dtype}/k{columns}",
                kernel=_quantize_kernel,
                arch=arch,
                signature={
                    **{"x": f"*{dtype}", "values": "*fp8e4nv", "scales": "*fp32", "num_columns": "i32"},
                    **{"x_stride": "i32", "COLUMNS": "constexpr"},
                },
                constexprs={"COLUMNS": columns},
                num_warps=_warps(columns),
                num_stages=3,
                aligned=("x", "values", "scales", "num_columns", "x_stride"),
            )
        pointers = ("product", "x_scales", "scales", "bias", "residual", "out")
        yield CompileCase(
            name=f"fp8_finish/{dtype}",
            kernel=_finish_kernel,
            arch=arch,
            signature={
                **{name: "*fp32" if name.endswith(("product", "scales")) else f"*{dtype}" for name in pointers},
                **dict.fromkeys(("num_rows", "residual_stride", "out_stride", "has_bias", "has_residual"), "i32"),
                "COLUMNS": "constexpr",
            },
            constexprs={"COLUMNS": _FINISH_COLUMNS},
            num_warps=4,
            num_stages=3,
            aligned=(*pointers, "num_rows", "residual_stride", "out_stride"),
        )
