"""Every block format decodes to the same numbers as the gguf package's decoder."""

from __future__ import annotations

import numpy as np
import pytest
from float_codes import FLOATS
from memory_models import FLOAT_BLOCKS, GROUPS, random_tensor

from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.ops.ref_dequant import E4M3, dequantize
from naru_worker.adapters.weights.gguf_file import TENSOR_TYPES
from naru_worker.adapters.weights.tensor_format import BLOCKS, tensor_bytes

gguf = pytest.importorskip("gguf", reason="the decoder compared with")

HALVES = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
"""Byte offsets of the half-precision scales in a block; random bytes there could be NaN."""


@pytest.mark.parametrize("tensor_format", HALVES)
def test_random_blocks_decode_like_the_reference(tensor_format: TensorFormat) -> None:
    rng = np.random.default_rng(5)
    elements, size = BLOCKS[tensor_format]
    blocks = rng.integers(0, 256, (6, size), dtype=np.uint8)
    for offset in HALVES[tensor_format]:
        blocks[:, offset : offset + 2] = rng.standard_normal((6, 1)).astype("<f2").view(np.uint8)
    tensor = RawTensor("t", tensor_format, (3, 2 * elements), memoryview(blocks.tobytes()))
    kind = gguf.GGMLQuantizationType[tensor_format.upper()]
    expected = gguf.dequantize(blocks.reshape(3, 2 * size), kind)
    np.testing.assert_allclose(dequantize(tensor), expected, rtol=1e-6, atol=1e-6)
    assert len(tensor.data) == tensor_bytes(tensor_format, tensor.shape)


def test_plain_formats_decode_exactly() -> None:
    values = np.array([[1.5, -2.0, 3.25, 0.0]], np.float32)
    raw: dict[TensorFormat, bytes] = {
        "f32": values.tobytes(),
        "f16": values.astype("<f2").tobytes(),
        "bf16": (values.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }
    for tensor_format, data in raw.items():
        assert np.array_equal(dequantize(RawTensor("t", tensor_format, (1, 4), memoryview(data))), values)


def test_the_table_of_blocks_agrees_with_the_reference() -> None:
    for name in TENSOR_TYPES.values():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] == BLOCKS[name]


@pytest.mark.parametrize("tensor_format", [*GROUPS, *FLOAT_BLOCKS])
def test_blocks_of_other_quantizers_decode_to_what_they_were_made_of(tensor_format: TensorFormat) -> None:
    tensor, values = random_tensor("t", tensor_format, (5, 256), np.random.default_rng(6))
    np.testing.assert_allclose(dequantize(tensor), values, rtol=1e-6, atol=1e-6)
    assert len(tensor.data) == tensor_bytes(tensor_format, tensor.shape)


def test_every_8_bit_float_is_what_its_bits_say() -> None:
    np.testing.assert_array_equal(E4M3, FLOATS.astype(np.float32))
