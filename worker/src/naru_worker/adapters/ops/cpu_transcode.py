"""Weights in formats that native code has: those of other quantizers' blocks are changed into GGUF's.

Called where weights are packed, into memory or into an image. 4-bit blocks of 64 and 128 columns become blocks of 32
with the same scales: exactly. 8-bit floats become Q8_0: an error of at most 1/254 of a block's largest value, a fifth
of what rounding to 8-bit floats has cost before; exact 16-bit floats would take twice the memory and time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.ops.ref_dequant import E4M3
from naru_worker.adapters.weights.block_rows import half_bytes
from naru_worker.adapters.weights.lazy_tensor import Bytes, LazyTensor, rows_of
from naru_worker.adapters.weights.tensor_format import BLOCKS

_COLUMNS = 32
_LARGEST = 127.0


def native_tensor(tensor: RawTensor) -> RawTensor:
    """The tensor in a format of `cpu_pack.FORMAT_NUMBERS`: itself where it is, else a lazy one."""
    found = _TARGETS.get(tensor.format)
    if found is None:
        return tensor
    target, transcode = found
    block_bytes = BLOCKS[tensor.format][1]

    def rows(first: int, last: int) -> Bytes:
        blocks = rows_of(tensor, first, last).reshape(-1, block_bytes)
        return transcode(blocks, tensor.name).reshape(last - first, -1)

    return LazyTensor(tensor.name, target, (tensor.shape[0], tensor.shape[1]), rows)


def _four_bits(head_bytes: int) -> Callable[[Bytes, str], Bytes]:
    """To blocks of 32 columns with the same head: scale, and minimum."""

    def transcode(blocks: Bytes, _name: str) -> Bytes:
        packed = blocks[:, head_bytes:]
        integers = np.concatenate([packed & 15, packed >> 4], axis=1).reshape(len(blocks), -1, 2, _COLUMNS // 2)
        halves = integers[:, :, 0] | (integers[:, :, 1] << 4)
        heads = np.broadcast_to(blocks[:, None, :head_bytes], (*halves.shape[:2], head_bytes))
        return np.concatenate([heads, halves], axis=2)

    return transcode


def _bytes_of_floats(blocks: Bytes, name: str) -> Bytes:
    codes = blocks[:, 4:].reshape(-1, _COLUMNS)
    scales = np.repeat(np.ascontiguousarray(blocks[:, :4]).view("<f4"), len(codes) // len(blocks), axis=0)
    # Without their signs, codes are in the order of what they stand for.
    largest = E4M3[(codes & 127).max(axis=1, keepdims=True)] * np.abs(scales)
    head = half_bytes(largest[:, 0] / np.float32(_LARGEST), name)
    steps = head.view("<f2").astype(np.float32)
    # Blocks of zeros, and of numbers so small that 16 bits have no scale for them, or a rough one.
    factors = np.divide(scales, steps, out=np.zeros_like(scales), where=steps > 0)
    values = E4M3.take(codes)
    values *= factors
    np.clip(np.rint(values, out=values), -_LARGEST, _LARGEST, out=values)
    return np.concatenate([head, values.astype(np.int8).view(np.uint8)], axis=1)


_TARGETS: dict[TensorFormat, tuple[TensorFormat, Callable[[Bytes, str], Bytes]]] = {
    "q4_s64": ("q4_0", _four_bits(2)),
    "q4_s128": ("q4_0", _four_bits(2)),
    "q4_g64": ("q4_1", _four_bits(4)),
    "q4_g128": ("q4_1", _four_bits(4)),
    "e4m3_row": ("q8_0", _bytes_of_floats),
    "e4m3_b32": ("q8_0", _bytes_of_floats),
    "e4m3_b128": ("q8_0", _bytes_of_floats),
}
