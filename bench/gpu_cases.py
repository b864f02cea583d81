"""One case for each kernel of the `cuda` backend: how it is launched, what it must give, what it must move. For `gpu`.

The shapes are those of one layer of a model. Bytes and operations are what the kernel cannot avoid, as in `naru plan`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "worker" / "support"))

from memory_models import random_blocks

from naru_worker.adapters.ops.cuda.kernels.act import act
from naru_worker.adapters.ops.cuda.kernels.copy_blocks import copy_blocks
from naru_worker.adapters.ops.cuda.kernels.embed import embed
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import fp8_linear, quantize_weight
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import Regime
from naru_worker.adapters.ops.cuda.kernels.norm import norm
from naru_worker.adapters.ops.cuda.linear import linear
from naru_worker.adapters.ops.cuda.weights import DenseRows, LinearWeight, pack_matrix
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.ops.ref_dequant import dequantize

EPS = 1e-5
FP8_ARCH = 89
FP8_TOLERANCE = 5e-2
"""Activations of 8 bits are off by up to a sixteenth each; over a row that averages out."""
FORMATS: tuple[TensorFormat, ...] = ("q4_0", "q8_0", "q4_k")
_BLOCK_WORDS_OF_A_LAYER = 2


@dataclass(frozen=True, slots=True)
class Setup:
    """What the cases are made for."""

    device: torch.device
    arch: int
    dtype: torch.dtype
    """Of activations."""
    hidden: int = 4096
    inner: int = 14_336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128_256
    batch: int = 64
    """Sequences that generate."""
    context: int = 4096
    """Tokens of each."""
    prompt: int = 4096
    block_size: int = 16

    @property
    def tolerance(self) -> float:
        """Largest error, as part of the largest expected magnitude, that rounding results of this type explains."""
        return {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(self.dtype, 1e-4)

    def normal(self, *shape: int) -> Tensor:
        """Random numbers of the activations' type; the same in each process."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def indices(self, count: int, below: int) -> Tensor:
        """Random int32 numbers."""
        generator = torch.Generator(self.device).manual_seed(count)
        found = torch.randint(below, (count,), generator=generator, device=self.device)
        return found.to(torch.int32)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A launch with its inputs on the device."""

    name: str
    run: Callable[[], Tensor]
    """Enqueues the kernel, gives its result. Repeating it must not change the work."""
    expected: Callable[[], Tensor]
    """The right result, by plain torch; asked for before the first run."""
    tolerance: float
    bytes: int
    operations: int = 0
    is_fp8: bool = False
    """Whether the FP8 units compute it."""
    check: Callable[[], Tensor] | None = None
    """Runs and gives all that is to be right; None: `run` does."""


def elementwise_cases(setup: Setup) -> Iterator[KernelCase]:
    """Copies, rows of tables, norms, activations; for generated tokens and for a prompt."""
    yield _copies(setup)
    for kind, rows in (("decode", setup.batch), ("prefill", setup.prompt)):
        yield _embed(setup, kind, rows)
        yield _norm(setup, kind, rows)
        yield _act(setup, kind, rows)


def product_cases(setup: Setup) -> Iterator[KernelCase]:
    """The largest linear layer: in 16 bits by cuBLAS, and quantized in groups by the own kernels."""
    kinds: list[tuple[str, int, Regime]] = [
        ("decode of 1", 1, "generated"),
        ("decode", setup.batch, "generated"),
        ("prefill", setup.prompt, "prompt"),
    ]
    for kind, rows, regime in kinds:
        yield _dense(setup, kind, rows, regime)
        for tensor_format in FORMATS:
            yield _groups(setup, kind, rows, regime, tensor_format)
        if setup.arch >= FP8_ARCH:
            yield _fp8(setup, kind, rows)


def _copies(setup: Setup) -> KernelCase:
    words = setup.block_size * setup.num_kv_heads * setup.head_dim * _BLOCK_WORDS_OF_A_LAYER
    num_pairs = 2 * setup.batch
    blocks = torch.randint(-(2**31), 2**31 - 1, (2 * num_pairs, words), device=setup.device, dtype=torch.int32)
    pairs = torch.arange(2 * num_pairs, device=setup.device, dtype=torch.int32).reshape(2, num_pairs).T.contiguous()

    def run() -> Tensor:
        copy_blocks(blocks, pairs)
        return blocks

    def expected() -> Tensor:
        return torch.cat([blocks[:num_pairs], blocks[:num_pairs]])

    return KernelCase("copy blocks", run, expected, 0.0, 2 * num_pairs * words * 4)


def _embed(setup: Setup, kind: str, rows: int) -> KernelCase:
    table, ids = setup.normal(setup.vocab, setup.hidden), setup.indices(rows, setup.vocab)
    moved = 2 * rows * setup.hidden * table.itemsize
    return KernelCase(f"embed, {kind}", lambda: embed(ids, table), lambda: table[ids.long()], 0.0, moved)


def _norm(setup: Setup, kind: str, rows: int) -> KernelCase:
    x, weight = setup.normal(rows, setup.hidden), setup.normal(setup.hidden).float()
    out = torch.empty_like(x)

    def expected() -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * weight

    moved = 2 * rows * setup.hidden * x.itemsize
    return KernelCase(
        f"RMS norm, {kind}", lambda: norm(x, weight, None, EPS, "rms", out=out), expected, setup.tolerance, moved
    )


def _act(setup: Setup, kind: str, rows: int) -> KernelCase:
    x = setup.normal(rows, 2 * setup.inner)
    out = torch.empty(rows, setup.inner, device=setup.device, dtype=setup.dtype)

    def expected() -> Tensor:
        gate, up = x.float().chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    moved = 3 * rows * setup.inner * x.itemsize
    return KernelCase(f"SwiGLU, {kind}", lambda: act(x, "swiglu", out=out), expected, setup.tolerance, moved)


def _dense(setup: Setup, kind: str, rows: int, regime: Regime) -> KernelCase:
    values = setup.normal(setup.inner, setup.hidden)
    weight = LinearWeight(num_rows=setup.inner, num_columns=setup.hidden, segments=(DenseRows(values),), bias=None)
    name = f"product 16 bits (cuBLAS), {kind}"
    return _product(setup, name, rows, regime, weight, values.float(), values.numel() * values.itemsize)


def _groups(setup: Setup, kind: str, rows: int, regime: Regime, tensor_format: TensorFormat) -> KernelCase:
    part = _random_weights(tensor_format, setup.inner, setup.hidden)
    packed = pack_matrix([part], [None], setup.dtype).placed(lambda tensor: tensor.to(setup.device))
    values = torch.from_numpy(dequantize(part)).to(setup.device, torch.float32)
    return _product(setup, f"product {tensor_format}, {kind}", rows, regime, packed, values, len(part.data))


def _fp8(setup: Setup, kind: str, rows: int) -> KernelCase:
    values, x = setup.normal(setup.inner, setup.hidden), setup.normal(rows, setup.hidden)
    weight, out = quantize_weight(values), torch.empty(rows, setup.inner, device=setup.device, dtype=setup.dtype)
    held = weight.values.float() * weight.scales[:, None]
    moved = weight.values.numel() + (x.numel() + out.numel()) * x.itemsize
    return KernelCase(
        name=f"product fp8, {kind}",
        run=lambda: fp8_linear(x, weight, out=out),
        expected=lambda: x.float() @ held.T,
        tolerance=FP8_TOLERANCE,
        bytes=moved,
        operations=2 * rows * setup.hidden * setup.inner,
        is_fp8=True,
    )


@cache
def _random_weights(tensor_format: TensorFormat, rows: int, columns: int) -> RawTensor:
    return random_blocks("w", tensor_format, (rows, columns), np.random.default_rng(0))


def _product(
    setup: Setup, name: str, rows: int, regime: Regime, weight: LinearWeight, values: Tensor, weight_bytes: int
) -> KernelCase:
    x = setup.normal(rows, setup.hidden)
    out = torch.empty(rows, setup.inner, device=setup.device, dtype=setup.dtype)
    moved = weight_bytes + (x.numel() + out.numel()) * x.itemsize
    return KernelCase(
        name=name,
        run=lambda: linear(x, weight, regime=regime, out=out, arch=setup.arch),
        expected=lambda: x.float() @ values.T,
        tolerance=max(setup.tolerance, 2e-3),
        bytes=moved,
        operations=2 * rows * setup.hidden * setup.inner,
    )
