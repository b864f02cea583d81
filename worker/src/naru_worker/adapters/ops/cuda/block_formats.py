"""Block formats taken apart: integers, scales and minimums of some rows, without their product.

Used to repack weights for the GPU. Knows nothing of the layout there.

Source: the block layouts of ggml (ggml-common.h) as the GGUF specification names them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupKind
from naru_worker.adapters.ops.protocol import TensorFormat
from naru_worker.adapters.weights.tensor_format import BLOCKS

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Unpacked = tuple[Bytes, Floats, Floats | None]

KIND_OF_FORMAT: dict[TensorFormat, GroupKind] = {
    "q4_0": GroupKind(4, 32, 8, False),
    "q4_1": GroupKind(4, 32, 0, True),
    "q8_0": GroupKind(8, 32, 128, False),
    "q4_k": GroupKind(4, 32, 0, True),
    "q6_k": GroupKind(8, 16, 32, False),
    "q4_s64": GroupKind(4, 64, 8, False),
    "q4_s128": GroupKind(4, 128, 8, False),
    "q4_g64": GroupKind(4, 64, 0, True),
    "q4_g128": GroupKind(4, 128, 0, True),
    "e4m3_row": GroupKind(8, 0, 0, False, is_float=True),
    "e4m3_b32": GroupKind(8, 32, 0, False, is_float=True),
    "e4m3_b128": GroupKind(8, 128, 0, False, is_float=True),
}
"""What a quantized format becomes on a GPU; float formats are not in it."""


def unpack_rows(tensor_format: TensorFormat, rows: Bytes) -> Unpacked:
    """Integers (rows, columns), scales and minimums (rows, groups) of rows of raw bytes (rows, row_bytes)."""
    count, kind = len(rows), KIND_OF_FORMAT[tensor_format]
    integers, scales, minimums = _UNPACKERS[tensor_format](rows.reshape(-1, BLOCKS[tensor_format][1]))
    scales = scales.reshape(count, -1)
    return (
        integers.reshape(count, -1),
        scales if kind.group else scales[:, :1],
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


def _e4m3(blocks: Bytes) -> Unpacked:
    return blocks[:, 4:].copy(), np.ascontiguousarray(blocks[:, :4]).view("<f4"), None


_UNPACKERS: dict[TensorFormat, Callable[[Bytes], Unpacked]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
    "q4_s64": _q4_0,
    "q4_s128": _q4_0,
    "q4_g64": _q4_1,
    "q4_g128": _q4_1,
    "e4m3_row": _e4m3,
    "e4m3_b32": _e4m3,
    "e4m3_b128": _e4m3,
}
