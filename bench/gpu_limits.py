"""What this GPU reaches at best: a large copy and large products. Kernels are held against these. Called by `gpu`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bench.gpu_timing import Clock, timed

COPY_BYTES = 1 << 30
PRODUCT_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured, in units a second."""

    bandwidth: float
    """Bytes, reads and writes together."""
    flops_16: float
    flops_8: float
    """0: the GPU has no FP8 units, or torch none for them."""


def measured_limits(
    device: torch.device, clock: Clock, dtype: torch.dtype, *, copy_bytes: int = COPY_BYTES, size: int = PRODUCT_SIZE
) -> Limits:
    """Copies `copy_bytes` and multiplies square matrices of `size` rows; takes a few seconds and 3 GB."""
    copied = _copy_seconds(device, clock, copy_bytes)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    multiplied = timed(lambda: torch.mm(left, right, out=out), clock, budget_s=1.0).median_s
    operations = 2 * size**3
    eighths = _fp8_seconds(left, right, clock)
    return Limits(
        bandwidth=2 * copy_bytes / copied,
        flops_16=operations / multiplied,
        flops_8=operations / eighths if eighths else 0.0,
    )


def _copy_seconds(device: torch.device, clock: Clock, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), clock).median_s


def _fp8_seconds(left: torch.Tensor, right: torch.Tensor, clock: Clock) -> float:
    multiply = getattr(torch, "_scaled_mm", None)
    if multiply is None or not left.is_cuda or torch.cuda.get_device_capability(left.device) < (8, 9):
        return 0.0
    one = torch.ones((), device=left.device)
    # The right operand has to lie by columns.
    a, b = left.to(torch.float8_e4m3fn), right.T.contiguous().to(torch.float8_e4m3fn).T
    try:
        return timed(
            lambda: multiply(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), clock, budget_s=1.0
        ).median_s
    except RuntimeError:  # refused: the kernels that need it say so, with the reason
        return 0.0
