"""Rows of numbers as the block formats that run along the columns: what other quantizers' layouts are turned into.

Used where a quantized folder is read and where formats are changed for the CPU. Exact but for scales, which q4 formats
hold in 16 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import FloatArray, TensorFormat
from naru_worker.adapters.weights.lazy_tensor import Bytes

GROUPED: dict[tuple[int, bool], TensorFormat] = {
    (32, True): "q4_0",
    (64, True): "q4_s64",
    (128, True): "q4_s128",
    (32, False): "q4_1",
    (64, False): "q4_g64",
    (128, False): "q4_g128",
}
"""4-bit formats by the columns of a block and whether 8 stands for 0 in all of them."""


def four_bit_rows(integers: Bytes, scales: FloatArray, minimums: FloatArray | None, name: str) -> Bytes:
    """Blocks of scale, minimum where there is one, and nibbles: first the low halves of the bytes, then the high ones.

    Args:
        integers: (rows, columns), 0 to 15.
        scales: (rows, blocks).
        minimums: The same; None where 8 stands for 0.
        name: Of the tensor, for errors.

    Returns:
        (rows, bytes of a row).

    Raises:
        LoadError: a scale or minimum is not finite in 16 bits.
    """
    rows, blocks = scales.shape
    halves = integers.reshape(rows, blocks, 2, -1)
    head = [half_bytes(scales, name)] + ([] if minimums is None else [half_bytes(minimums, name)])
    return np.concatenate([*head, halves[:, :, 0] | (halves[:, :, 1] << 4)], axis=2).reshape(rows, -1)


def float_rows(values: Bytes, scales: FloatArray) -> Bytes:
    """Blocks of an f32 scale and 8-bit floats, (rows, bytes of a row).

    Args:
        values: (rows, columns), e4m3.
        scales: (rows, blocks).
    """
    rows, blocks = scales.shape
    head = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(rows, blocks, 4)
    return np.concatenate([head, values.reshape(rows, blocks, -1)], axis=2).reshape(rows, -1)


def half_bytes(values: FloatArray, name: str) -> Bytes:
    """Numbers as f16, the bytes of each along a new last axis.

    Raises:
        LoadError: one is not finite.
    """
    with np.errstate(over="ignore"):
        halves: npt.NDArray[np.float16] = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise LoadError(f"tensor {name!r} has scales that 16 bits cannot hold", param=name)
    return np.ascontiguousarray(halves).view(np.uint8).reshape(*values.shape, 2)
