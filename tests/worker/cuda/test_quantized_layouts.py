"""GPTQ, AWQ and FP8 weights: from arrays as checkpoints hold them to products, against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from naru_proto.errors import LoadError  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import (  # noqa: E402
    fp8_linear,
    fp8_obstacle,
    quantize_rows,
    quantize_weight,
)
from naru_worker.adapters.ops.cuda.kernels.gemm_groups import gemm_groups  # noqa: E402
from naru_worker.adapters.ops.cuda.quantized_layouts import (  # noqa: E402
    from_awq,
    from_fp8,
    from_gptq,
    packed_kind,
    weight_only,
)
from naru_worker.adapters.ops.cuda.weights import stacked_rows  # noqa: E402

Array = Any


def _words(nibbles: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Eight neighbours along an axis in one word: nibble i is neighbour order[i]."""
    moved = np.moveaxis(nibbles, axis, -1).astype(np.uint32)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    packed = sum(eights[..., order[i]] << np.uint32(4 * i) for i in range(8))
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32), -1, axis)).view(np.int32)


def _integers(columns: int, rows: int, groups: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(columns + groups)
    scales = rng.uniform(0.001, 0.02, (groups, rows)).astype(np.float16)
    return rng.integers(0, 16, (columns, rows)), rng.integers(1, 16, (groups, rows)), scales


def _weight(integers: Array, zeros: Array, scales: Array) -> Any:
    """(rows, columns), float64."""
    each = len(integers) // len(scales)
    wide = np.repeat(scales.astype(np.float64), each, axis=0)
    return torch.from_numpy(((integers - np.repeat(zeros, each, axis=0)) * wide).T)


def _check_products(packed: Any, weight: Any) -> None:
    x = torch.randn(3, weight.shape[1])
    expected = x.double() @ weight.T
    for regime in ("generated", "prompt"):
        y = gemm_groups(x, packed, regime=regime)
        assert (y.double() - expected).abs().max() <= 2e-3 * expected.abs().max()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq_products_are_those_of_its_weights(group_size: int, symmetric: bool) -> None:
    groups = 256 // group_size if group_size > 0 else 1
    integers, zeros, scales = _integers(256, 40, groups)
    if symmetric:
        zeros = np.full_like(zeros, 8)
    arrays = _words(integers, 0), _words(zeros - 1, 1), scales
    packed = from_gptq(*arrays, np.arange(256) // (256 // groups), group_size=group_size, symmetric=symmetric)
    assert packed.kind == packed_kind(group_size, 256, symmetric=symmetric)
    _check_products(packed, _weight(integers, zeros, scales))


def test_gptq_of_the_second_version_stores_zeros_as_they_are() -> None:
    integers, zeros, scales = _integers(128, 16, 1)
    arrays = _words(integers, 0), _words(zeros, 1), scales
    packed = from_gptq(*arrays, group_size=128, symmetric=False, stores_zero_minus_one=False)
    _check_products(packed, _weight(integers, zeros, scales))


@pytest.mark.parametrize("group_size", [32, 128])
def test_awq_products_are_those_of_its_weights_stacked_too(group_size: int) -> None:
    parts, weights = [], []
    for rows in (24, 40):
        integers, zeros, scales = _integers(256, rows, 256 // group_size)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts.append(from_awq(_words(integers, 1, order), _words(zeros, 1, order), scales, group_size=group_size))
        weights.append(_weight(integers, zeros, scales))
    _check_products(stacked_rows(parts), torch.cat(weights))


def test_what_is_not_supported_is_said() -> None:
    integers, zeros, scales = _integers(128, 16, 1)
    qweight, qzeros = _words(integers, 0), _words(zeros - 1, 1)
    with pytest.raises(LoadError, match="groups of 48"):
        from_gptq(qweight, qzeros, scales, group_size=48, symmetric=False)
    with pytest.raises(LoadError, match="'q' has qzeros of shape"):
        from_gptq(qweight, qzeros[:0], scales, group_size=128, symmetric=False, name="q")
    with pytest.raises(LoadError, match="desc_act"):
        from_gptq(qweight, qzeros, scales, np.arange(128)[::-1] // 64, group_size=128, symmetric=False)
    with pytest.raises(LoadError, match="said to be symmetric"):
        from_gptq(qweight, qzeros, scales, group_size=128, symmetric=True)
    with pytest.raises(LoadError, match="different ways"):
        finer = from_gptq(qweight, qzeros.repeat(2, 0), scales.repeat(2, 0), group_size=64, symmetric=False)
        stacked_rows([from_gptq(qweight, qzeros, scales, group_size=128, symmetric=False), finer])
    with pytest.raises(LoadError, match="one a row, is supported"):
        from_fp8(torch.zeros(8, 4, dtype=torch.float8_e4m3fn), torch.ones(2, 2))


def _fp8_weight() -> tuple[Any, Any]:
    rows = quantize_weight(torch.randn(48, 96) * torch.logspace(-3, 2, 48)[:, None])
    return rows, rows.values.double() * rows.scales.double()[:, None]


def test_fp8_on_both_sides_with_bias_and_residual() -> None:
    rows, weight = _fp8_weight()
    x, bias, residual = torch.randn(5, 96), torch.randn(48), torch.randn(5, 48)
    values, scales = quantize_rows(x)
    torch.testing.assert_close(scales, x.abs().amax(1, keepdim=True) / 448)
    assert torch.equal(values.float(), (x / scales).to(torch.float8_e4m3fn).float())
    expected = (values.double() * scales.double()) @ weight.T
    torch.testing.assert_close(fp8_linear(x, rows).double(), expected, rtol=1e-5, atol=1e-5)
    out = residual.clone()
    fp8_linear(x, rows, bias=bias, residual=out, out=out)
    torch.testing.assert_close(out.double(), expected + bias + residual, rtol=1e-5, atol=1e-5)
    assert fp8_linear(x[:0], rows).shape == (0, 48)
    assert (quantize_rows(torch.zeros(1, 96))[0].float() == 0).all()


@pytest.mark.parametrize("regime", ["generated", "prompt"])
def test_fp8_weights_with_wider_activations_where_tensor_cores_have_no_fp8(regime: Any) -> None:
    rows, weight = _fp8_weight()
    x = torch.randn(5, 96)
    y = gemm_groups(x, weight_only(from_fp8(rows.values, rows.scales)), regime=regime)
    torch.testing.assert_close(y.double(), x.double() @ weight.T, rtol=1e-5, atol=1e-5)


def test_every_8_bit_float_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)[:, None].repeat(1, 32)
    y = gemm_groups(torch.eye(32), weight_only(from_fp8(values, torch.ones(1))), regime="prompt")
    assert torch.equal(y[0], values[:, 0].float())


def test_why_fp8_is_not_multiplied_as_such_is_said() -> None:
    assert fp8_obstacle((9, 0), 4096, 4096) is None
    assert fp8_obstacle((8, 9), 4096, 4096) is None
    assert "8.0 has no tensor cores for 8-bit floats" in str(fp8_obstacle((8, 0), 4096, 4096))
    assert "40 rows" in str(fp8_obstacle((9, 0), 40, 4096))
