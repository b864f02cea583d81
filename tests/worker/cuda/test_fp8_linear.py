"""Products of 8-bit floats on both sides, and of weights alone, against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from memory_models import random_tensor  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.act import act  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import (  # noqa: E402
    Fp8Rows,
    fp8_linear,
    fp8_obstacle,
    quantize_rows,
    quantize_weight,
)
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import gemm_groups  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupRows  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.norm import norm  # noqa: E402
from naru_worker.adapters.ops.cuda.linear import linear  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import DenseRows, pack_matrix, packed_bytes  # noqa: E402
from naru_worker.adapters.ops.protocol import RawTensor  # noqa: E402
from naru_worker.core.model_config import Activation, NormKind  # noqa: E402


def _fp8_weight() -> tuple[Any, Any]:
    rows = quantize_weight(torch.randn(48, 96) * torch.logspace(-3, 2, 48)[:, None])
    return rows, rows.values.double() * rows.scales.double()[:, None]


def test_fp8_on_both_sides_with_bias_and_residual() -> None:
    rows, weight = _fp8_weight()
    x, bias, residual = torch.randn(5, 96), torch.randn(48), torch.randn(5, 48)
    quantized = quantize_rows(x)
    scales = quantized.scales[:, None]
    torch.testing.assert_close(scales, x.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(quantized.values.float(), (x / scales).to(torch.float8_e4m3fn).float())
    expected = (quantized.values.double() * scales.double()) @ weight.T
    torch.testing.assert_close(fp8_linear(x, rows).double(), expected, rtol=1e-5, atol=1e-5)
    out = residual.clone()
    fp8_linear(x, rows, bias=bias, residual=out, out=out)
    torch.testing.assert_close(out.double(), expected + bias + residual, rtol=1e-5, atol=1e-5)
    assert fp8_linear(x[:0], rows).shape == (0, 48)
    assert (quantize_rows(torch.zeros(1, 96)).values.float() == 0).all()


def same_rows(one: Fp8Rows, other: Fp8Rows) -> bool:
    """Bit for bit."""
    codes = torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    return bool(codes and torch.equal(one.scales, other.scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_that_rounds_to_8_bits_gives_what_a_pass_of_its_own_would(kind: NormKind, dtype: Any) -> None:
    torch.manual_seed(0)
    x = (torch.randn(9, 208) * 3 + 1).to(dtype)[:, :192]
    x[2] = 0
    weight, bias = torch.randn(192), torch.randn(192) if kind == "layer" else None
    rows = Fp8Rows.empty(9, 192, x.device)
    norm(x, weight, bias, 1e-5, kind, out=rows.values, scales=rows.scales)
    assert same_rows(rows, quantize_rows(norm(x, weight, bias, 1e-5, kind)))
    assert len(set(rows.values.view(torch.uint8).flatten().tolist())) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["swiglu", "gelu_tanh", "gelu"])
def test_an_activation_that_rounds_to_8_bits_gives_what_a_pass_of_its_own_would(kind: Activation, dtype: Any) -> None:
    torch.manual_seed(0)
    width = 4112  # more than one turn
    x = (torch.randn(3, 2 * width) * 4).to(dtype)[:, : 2 * width if kind == "swiglu" else width]
    x[1] = 0
    rows = Fp8Rows.empty(3, width, x.device)
    act(x, kind, out=rows.values, scales=rows.scales)
    assert same_rows(rows, quantize_rows(act(x, kind)))
    assert len(set(rows.values.view(torch.uint8).flatten().tolist())) > 100


def test_what_is_quantized_already_is_multiplied_as_it_is() -> None:
    rows, _ = _fp8_weight()
    x, bias = torch.randn(5, 96), torch.randn(48)
    residual = torch.randn(5, 48)
    expected = fp8_linear(x, rows, bias=bias, residual=residual)
    assert torch.equal(fp8_linear(quantize_rows(x), rows, bias=bias, residual=residual, out=residual), expected)
    assert fp8_linear(quantize_rows(x[:0]), rows, out=residual[:0]).shape == (0, 48)


def test_every_8_bit_float_is_decoded_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 127) != 127]
    blocks = np.zeros((len(codes), 36), np.uint8)
    blocks[:, :4], blocks[:, 4:] = np.ones(1, "<f4").view(np.uint8), codes[:, None]
    part = RawTensor("w", "e4m3_row", (len(codes), 32), memoryview(blocks.tobytes()))
    (rows,) = pack_matrix([part], [None], torch.float32).segments
    assert isinstance(rows, GroupRows)
    y = gemm_groups(torch.eye(32), rows, regime="prompt")
    assert torch.equal(y[0], torch.from_numpy(codes).view(torch.float8_e4m3fn).float())


def test_stacked_rows_are_one_product_beside_what_a_gpu_multiplies_otherwise() -> None:
    rng = np.random.default_rng(0)
    formats: list[Any] = [("e4m3_row", 32), ("e4m3_row", 16), ("f32", 16), ("e4m3_row", 8), ("e4m3_b128", 16)]
    pairs = [random_tensor(f"w{i}", *each, rng) for i, each in enumerate((kind, (rows, 256)) for kind, rows in formats)]
    parts, values = [part for part, _ in pairs], np.concatenate([value for _, value in pairs])
    weight = pack_matrix(parts, [None] * 5, torch.float32, (9, 0))
    # 8 rows are none that the units multiply.
    assert [type(segment) for segment in weight.segments] == [Fp8Rows, DenseRows, GroupRows, GroupRows]
    assert weight.segments[0].num_rows == 48
    sizes: list[int] = []

    def place(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        return tensor

    weight.placed(place)
    assert sum(sizes) == packed_bytes(parts, [None] * 5, torch.float32, (9, 0))
    x, residual = torch.randn(5, 256), torch.randn(5, 88)
    expected = x.double() @ torch.from_numpy(values).T
    for regime in ("generated", "prompt"):
        y = linear(x, weight, regime=regime, residual=residual).double() - residual
        # Activations of 8 bits: 2**-4 of each, which average out.
        assert (y - expected)[:, :48].abs().max() <= 0.05 * expected.abs().max()
        assert (y - expected)[:, 48:].abs().max() <= 1e-4 * expected.abs().max()


def test_why_fp8_is_not_multiplied_as_such_is_said() -> None:
    assert fp8_obstacle((9, 0), 4096, 4096) is None
    assert fp8_obstacle((8, 9), 4096, 4096) is None
    assert "8.0 has no tensor cores for 8-bit floats" in str(fp8_obstacle((8, 0), 4096, 4096))
    assert "40 rows" in str(fp8_obstacle((9, 0), 40, 4096))
