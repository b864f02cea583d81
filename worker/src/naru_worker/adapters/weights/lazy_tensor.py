"""A tensor whose bytes are made when somebody reads them: what a file holds in another layout than backends take.

Given by the checkpoint. Sizes follow from format and shape, so whoever only counts bytes makes none.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.tensor_format import BLOCKS, row_bytes, tensor_bytes

Bytes = npt.NDArray[np.uint8]
Rows = Callable[[int, int], Bytes]
"""Bytes of the rows [first, last), (rows, bytes of a row)."""

_STEP_ELEMENTS = 1 << 21
"""Elements that are made at once: what lies beside a tensor while its bytes are made."""


class LazyTensor(RawTensor):
    """A matrix made of `rows`, some at a time; nothing is kept."""

    __slots__ = ("rows",)

    def __init__(self, name: str, tensor_format: TensorFormat, shape: tuple[int, int], rows: Rows) -> None:
        """`rows` raises LoadError where the file's numbers cannot be used."""
        for field, value in (("name", name), ("format", tensor_format), ("shape", shape), ("rows", rows)):
            object.__setattr__(self, field, value)

    rows: Rows

    @property
    def data(self) -> memoryview:
        """All rows, made anew."""
        made = np.empty((self.shape[0], row_bytes(self.format, self.shape[1])), np.uint8)
        for first, last in row_steps(self):
            made[first:last] = self.rows(first, last)
        return made.reshape(-1).data.toreadonly()

    @property
    def num_bytes(self) -> int:
        """Of its data; makes none."""
        return tensor_bytes(self.format, self.shape)

    def renamed(self, name: str) -> LazyTensor:
        """The same under another name."""
        return LazyTensor(name, self.format, (self.shape[0], self.shape[1]), self.rows)

    def cut(self, rows: range, columns: range) -> LazyTensor:
        """A part of it, of whole blocks of columns."""
        elements, size = BLOCKS[self.format]
        start, stop = columns.start // elements * size, columns.stop // elements * size
        own, top = self.rows, rows.start

        def cut_rows(first: int, last: int) -> Bytes:
            return own(top + first, top + last)[:, start:stop]

        return LazyTensor(self.name, self.format, (len(rows), len(columns)), cut_rows)


def rows_of(tensor: RawTensor, first: int, last: int) -> Bytes:
    """Bytes of some rows of a matrix, (rows, bytes of a row); those of a lazy one are made."""
    if isinstance(tensor, LazyTensor):
        return tensor.rows(first, last)
    stride = row_bytes(tensor.format, tensor.shape[1])
    return np.frombuffer(tensor.data, np.uint8, (last - first) * stride, first * stride).reshape(last - first, stride)


def row_steps(tensor: RawTensor) -> list[tuple[int, int]]:
    """Runs of rows of a matrix that are worked on at once."""
    rows = max(1, _STEP_ELEMENTS // tensor.shape[1])
    return [(first, min(first + rows, tensor.shape[0])) for first in range(0, tensor.shape[0], rows)]
