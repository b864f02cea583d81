"""Products with quantized weights under Triton's interpreter, against plain torch over the decoded weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from memory_models import random_tensor as random_raw  # noqa: E402

from naru_worker.adapters.ops.cuda.kernels.gemm_groups import gemm_groups, num_splits  # noqa: E402
from naru_worker.adapters.ops.cuda.kernels.group_layout import KINDS, GroupRows  # noqa: E402
from naru_worker.adapters.ops.cuda.linear import linear  # noqa: E402
from naru_worker.adapters.ops.cuda.weights import pack_matrix, packed_bytes  # noqa: E402
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat  # noqa: E402
from naru_worker.adapters.ops.ref_dequant import dequantize  # noqa: E402


def random_tensor(tensor_format: TensorFormat, *shape: int, seed: int = 0) -> RawTensor:
    return random_raw("w", tensor_format, shape, np.random.default_rng(seed))[0]


QUANTIZED: list[TensorFormat] = [
    "q4_0", "q4_1", "q8_0", "q4_k", "q6_k",
    "q4_s64", "q4_s128", "q4_g64", "q4_g128", "e4m3_row", "e4m3_b32", "e4m3_b128",
]  # fmt: skip


def _expected(x: Any, parts: list[RawTensor], biases: list[RawTensor | None]) -> Any:
    y = x.double() @ torch.cat([torch.from_numpy(dequantize(part)) for part in parts]).double().T
    if any(bias is not None for bias in biases):
        pieces = [
            torch.zeros(part.shape[0]) if bias is None else torch.from_numpy(dequantize(bias))
            for part, bias in zip(parts, biases, strict=True)
        ]
        y += torch.cat(pieces)
    return y


def _group_rows(part: RawTensor) -> GroupRows:
    (segment,) = pack_matrix([part], [None], torch.float32).segments
    assert isinstance(segment, GroupRows)
    return segment


def _close(actual: Any, expected: Any, bound: float = 2e-3) -> None:
    # Scales are rounded to 16 bits: 2**-12 of the weights, which average out.
    assert actual.isfinite().all()
    assert (actual.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("regime", ["generated", "prompt"])
@pytest.mark.parametrize("tensor_format", QUANTIZED)
def test_product_is_that_of_the_decoded_weights(tensor_format: TensorFormat, regime: Any) -> None:
    part = random_tensor(tensor_format, 70, 512)
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(1))
    _close(gemm_groups(x, _group_rows(part), regime=regime), _expected(x, [part], [None]))


@pytest.mark.parametrize("regime", ["generated", "prompt"])
@pytest.mark.parametrize("num_tokens", [0, 15, 16, 17, 65, 130])
def test_any_number_of_tokens_with_bias_and_residual_into_columns_of_a_wider_output(
    num_tokens: int, regime: Any
) -> None:
    part, bias = random_tensor("q4_1", 33, 96), random_tensor("f32", 33)
    wide_x, wide = torch.randn(num_tokens, 128), torch.randn(num_tokens, 80)
    before, x, out = wide.clone(), wide_x[:, 16:112], wide[:, 20:53]
    expected = _expected(x, [part], [bias]) + before[:, 20:53].double()
    given = torch.from_numpy(dequantize(bias))
    result = gemm_groups(x, _group_rows(part), regime=regime, bias=given, residual=out, out=out)
    assert result.data_ptr() == out.data_ptr()
    if num_tokens:
        _close(out, expected)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 53:], before[:, 53:])


@pytest.mark.parametrize("regime", ["generated", "prompt"])
def test_half_precision_keeps_its_own_accuracy(regime: Any) -> None:
    part = random_tensor("q4_k", 40, 256)
    x = torch.randn(3, 256).half()
    y = gemm_groups(x, _group_rows(part), regime=regime)
    assert y.dtype == torch.float16
    _close(y, _expected(x, [part], [None]), bound=4e-3)


def test_what_lies_beyond_the_columns_of_x_is_not_read() -> None:
    part = random_tensor("q4_0", 16, 32)
    wide = torch.full((2, 64), math.nan)
    wide[:, :32] = torch.randn(2, 32)
    for regime in ("generated", "prompt"):
        _close(gemm_groups(wide[:, :32], _group_rows(part), regime=regime), _expected(wide[:, :32], [part], [None]))


@pytest.mark.parametrize("regime", ["generated", "prompt"])
def test_a_row_is_the_same_bit_for_bit_whatever_its_mates(regime: Any) -> None:
    weight = _group_rows(random_tensor("q4_k", 64, 1024))
    assert num_splits(weight.kind, 64, 1024, 80) > 1
    x = torch.randn(16, 1024)
    whole = gemm_groups(x, weight, regime=regime)
    assert torch.equal(gemm_groups(x[5:6], weight, regime=regime), whole[5:6])


def test_splits_cover_the_columns_and_follow_from_the_shape() -> None:
    for kind in KINDS:
        for rows, columns in ((64, 64), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (576, 1536)):
            for arch in (80, 89, 90):
                splits, chunks = num_splits(kind, rows, columns, arch), kind.num_chunks(columns)
                each = -(-chunks // splits)
                assert splits >= 1
                assert (splits - 1) * each < chunks <= splits * each


MIXED: list[list[TensorFormat]] = [["q4_k", "q4_1", "q6_k"], ["f16", "q8_0", "bf16"], ["f32", "f16", "bf16"]]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("formats", MIXED)
def test_a_stack_of_several_formats_is_one_layer(formats: list[TensorFormat], with_bias: bool) -> None:
    parts = [random_tensor(f, rows, 256, seed=rows) for f, rows in zip(formats, (48, 16, 20), strict=True)]
    biases: list[RawTensor | None] = (
        [random_tensor("f32", 48), None, random_tensor("f16", 20)] if with_bias else [None] * 3
    )
    weight = pack_matrix(parts, biases, torch.float32)
    x, residual = torch.randn(5, 256), torch.randn(5, 84)
    _close(linear(x, weight, regime="generated"), _expected(x, parts, biases))
    _close(linear(x, weight, regime="prompt", residual=residual), _expected(x, parts, biases) + residual.double())
    tensors: list[Any] = []

    def place(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    weight.placed(place)
    assert sum(tensor.nbytes for tensor in tensors) == packed_bytes(parts, biases, torch.float32)


@pytest.mark.parametrize("tensor_format", QUANTIZED)
def test_bytes_are_known_beforehand(tensor_format: TensorFormat) -> None:
    part = random_tensor(tensor_format, 7, 768)
    weight = _group_rows(part)
    tensors = [weight.quants, weight.scales, *([] if weight.minimums is None else [weight.minimums])]
    assert packed_bytes([part], [None], torch.float16) == sum(tensor.nbytes for tensor in tensors)


def test_scales_that_sixteen_bits_cannot_hold_are_refused() -> None:
    raw = bytearray(random_tensor("q4_k", 1, 256).data)
    raw[0:2] = np.float16(60000.0).tobytes()
    raw[4:8] = b"\x3f" * 4
    from naru_proto.errors import LoadError

    with pytest.raises(LoadError, match="'w' has values that float16 cannot hold"):
        pack_matrix([RawTensor("w", "q4_k", (1, 256), memoryview(bytes(raw)))], [None], torch.float16)
