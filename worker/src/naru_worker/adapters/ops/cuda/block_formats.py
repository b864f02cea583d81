"""GGUF's block formats taken apart: integers, scales and minimums of some rows, without their product.

Used to repack weights for the GPU. Knows nothing of the layout there.

Source: the block layouts of ggml (ggml-common.h) as the GGUF specification names them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupKind
from naru_worker.adapters.ops.protocol import TensorFormat

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Unpacked = tuple[Bytes, Floats, Floats | None]

KIND_OF_FORMAT: dict[TensorFormat, GroupKind] = {
    "q4_0": GroupKind(4, 32, 8, False),
    "q4_1": GroupKind(4, 32, 0, True),
    "q8_0": GroupKind(8, 32, 128, False),
    "q4_k": GroupKind(4, 32, 0, True),
    "q6_k": GroupKind(8, 16, 32, False),
}
"""What a quantized format becomes on a GPU; float formats are not in it."""


def unpack_rows(tensor_format: TensorFormat, rows: Bytes) -> Unpacked:
    """Integers (rows, columns), scales and minimums (rows, groups) of rows of raw bytes (rows, row_bytes)."""
    count, kind = len(rows), KIND_OF_FORMAT[tensor_format]
    integers, scales, minimums = _UNPACKERS[tensor_format](rows.reshape(-1, _BLOCK_BYTES[tensor_format]))
    return (
        integers.reshape(count, -1),
        scales.reshape(count, -1),
        minimums.reshape(count, -1) if minimums is not None and kind.has_minimum else None,
    )


def _half(blocks: Bytes, offset: int) -> Floats:
    """The f16 at a byte offset of each block, (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high nibbles, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    # Turning the sign bit of a signed byte adds 128.
    return blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), None


def _q4_k(blocks: Bytes) -> Unpacked:
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    integers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return integers, scales * _half(blocks, 0), -(minimums * _half(blocks, 2))


def _q6_k(blocks: Bytes) -> Unpacked:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    integers = low | (((high >> shifts) & np.uint8(3)) << np.uint8(4))
    return integers, blocks[:, 192:208].view(np.int8) * _half(blocks, 208), None


_UNPACKERS: dict[TensorFormat, Callable[[Bytes], Unpacked]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}
_BLOCK_BYTES: dict[TensorFormat, int] = {"q4_0": 18, "q4_1": 20, "q8_0": 34, "q4_k": 144, "q6_k": 210}
