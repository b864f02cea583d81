"""Sizes of the tensor formats: elements and bytes of one block.

Used by the readers to check lengths and by the checkpoint to cut rows. Does not decode anything.
"""

from __future__ import annotations

import math
from typing import get_args

from naru_worker.adapters.ops.protocol import TensorFormat

BLOCKS: dict[TensorFormat, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
    "q4_s64": (64, 34),
    "q4_s128": (128, 66),
    "q4_g64": (64, 36),
    "q4_g128": (128, 68),
    "e4m3_row": (32, 36),
    "e4m3_b32": (32, 36),
    "e4m3_b128": (128, 132),
}
"""Format to (elements, bytes) of a block. Blocks run along the columns."""

assert set(BLOCKS) == set(get_args(TensorFormat))


def row_bytes(tensor_format: TensorFormat, columns: int) -> int:
    """Bytes of one row; `columns` is a multiple of the block."""
    elements, size = BLOCKS[tensor_format]
    return columns // elements * size


def tensor_bytes(tensor_format: TensorFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a whole tensor; the last axis is a multiple of the block."""
    return math.prod(shape[:-1]) * row_bytes(tensor_format, shape[-1]) if shape else BLOCKS[tensor_format][1]
