"""A linear layer for a weight of any kind: each run of its rows by the kernel that fits it.

Called for each linear layer of a step. Launches kernels only: no sync, and fit for a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from naru_worker.adapters.ops.cuda.kernels.fp8_linear import Fp8Rows, fp8_linear
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime, gemm_groups
from naru_worker.adapters.ops.cuda.weights import DenseRows, LinearWeight


def linear(
    x: Tensor | Fp8Rows, weight: LinearWeight, *, regime: Regime, residual: Tensor | None = None,
    out: Tensor | None = None, arch: int = 80,
) -> Tensor:  # fmt: skip
    """X @ W.T (+ bias) (+ residual).

    Args:
        x: (M, num_columns), the type of the activations; or of 8 bits for a weight that `takes_fp8`.
        weight: On the same device.
        regime: Whether the rows were generated or belong to prompts.
        residual: (M, num_rows), the type of the activations. May be `out`.
        out: (M, num_rows), the type of the activations, mutated; rows may be strided. None: made like x,
            which must not be of 8 bits then.
        arch: One of `ARCHITECTURES`.
    """
    if out is None:
        assert isinstance(x, Tensor), "8-bit floats do not say what their product is to be"
        out = torch.empty((len(x), weight.num_rows), dtype=x.dtype, device=x.device)
    first = 0
    for segment in weight.segments:
        last = first + segment.num_rows
        bias = None if weight.bias is None else weight.bias[first:last]
        own = out[:, first:last]
        # The very same tensor, so that nobody has to find out that a sum is in place.
        added = own if residual is out else None if residual is None else residual[:, first:last]
        if isinstance(segment, Fp8Rows):
            fp8_linear(x, segment, bias=bias, residual=added, out=own)
        else:
            assert isinstance(x, Tensor), "the weight takes no 8-bit floats"
            if isinstance(segment, DenseRows):
                _dense(x, segment.values, bias, added, own)
            else:
                gemm_groups(x, segment, regime=regime, bias=bias, residual=added, out=own, arch=arch)
        first = last
    return out


def _dense(x: Tensor, values: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """By cuBLAS, which adds one of bias and residual on its way."""
    if residual is not None:
        torch.addmm(residual, x, values.T, out=out)
        if bias is not None:
            out += bias
    elif bias is not None:
        torch.addmm(bias, x, values.T, out=out)
    else:
        torch.mm(x, values.T, out=out)
