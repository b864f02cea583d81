"""Decodes every tensor format to float32 with numpy: the plain reading of the block layouts.

Used by the `ref` backend and by tests as the oracle of the fast decoders. Does not care for speed beyond vectorising.

Source: the block layouts of ggml (ggml-common.h) as the GGUF specification names them; e4m3 as in Micikevicius et al.,
"FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.protocol import FloatArray, RawTensor, TensorFormat

ByteArray = npt.NDArray[np.uint8]


def dequantize(tensor: RawTensor) -> FloatArray:
    """The tensor's values, of its shape; a fresh array."""
    decoded = _DECODERS[tensor.format](np.frombuffer(tensor.data, np.uint8))
    return decoded.reshape(tensor.shape)


def _f32(raw: ByteArray) -> FloatArray:
    return raw.view("<f4").astype(np.float32, copy=True)


def _f16(raw: ByteArray) -> FloatArray:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: ByteArray) -> FloatArray:
    # bfloat16 is the upper half of a float32.
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _halves(blocks: ByteArray, offset: int) -> FloatArray:
    """The f16 at a byte offset of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: ByteArray) -> FloatArray:
    """Low nibbles, then high nibbles, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float32)


def _q4_0(raw: ByteArray) -> FloatArray:
    blocks = raw.reshape(-1, 18)
    return (_nibbles(blocks[:, 2:]) - 8.0) * _halves(blocks, 0)


def _q4_1(raw: ByteArray) -> FloatArray:
    blocks = raw.reshape(-1, 20)
    return _nibbles(blocks[:, 4:]) * _halves(blocks, 0) + _halves(blocks, 2)


def _q8_0(raw: ByteArray) -> FloatArray:
    blocks = raw.reshape(-1, 34)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)


def _q4_k(raw: ByteArray) -> FloatArray:
    """Super-blocks of 8 x 32 elements; scales and minimums are 6 bits each, packed into 12 bytes."""
    blocks = raw.reshape(-1, 144)
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1).astype(np.float32)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1).astype(np.float32)
    # Each 32 bytes hold two sub-blocks: low nibbles, then high nibbles.
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scaled = values * (scales * _halves(blocks, 0))[:, :, None]
    result: FloatArray = scaled - (minimums * _halves(blocks, 2))[:, :, None]
    return result


def _q6_k(raw: ByteArray) -> FloatArray:
    """Super-blocks of 16 x 16 elements: 4 low bits, 2 high bits, signed 8-bit scales."""
    blocks = raw.reshape(-1, 210)
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    lows = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    highs = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    values = (lows | (highs << 4)).astype(np.float32) - 32.0
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    result: FloatArray = values.reshape(-1, 16, 16) * scales[:, :, None]
    return result


def _grouped(raw: ByteArray, columns: int, *, has_minimum: bool) -> FloatArray:
    """As q4_0 or q4_1, with more columns a block."""
    head = 4 if has_minimum else 2
    blocks = raw.reshape(-1, head + columns // 2)
    values = _nibbles(blocks[:, head:])
    if has_minimum:
        return values * _halves(blocks, 0) + _halves(blocks, 2)
    return (values - 8.0) * _halves(blocks, 0)


def _byte_floats() -> FloatArray:
    """The value of each byte as e4m3: a sign, four bits of exponent, three of mantissa; 127 and 255 are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


E4M3 = _byte_floats()


def _e4m3(raw: ByteArray, columns: int) -> FloatArray:
    blocks = raw.reshape(-1, 4 + columns)
    scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    values: FloatArray = E4M3[blocks[:, 4:]] * scales
    return values


_DECODERS: dict[TensorFormat, Callable[[ByteArray], FloatArray]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "q4_s64": partial(_grouped, columns=64, has_minimum=False),
    "q4_s128": partial(_grouped, columns=128, has_minimum=False),
    "q4_g64": partial(_grouped, columns=64, has_minimum=True),
    "q4_g128": partial(_grouped, columns=128, has_minimum=True),
    "e4m3_row": partial(_e4m3, columns=32),
    "e4m3_b32": partial(_e4m3, columns=32),
    "e4m3_b128": partial(_e4m3, columns=128),
}
