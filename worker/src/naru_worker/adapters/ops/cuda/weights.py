"""Weights of the GPU backend: from a checkpoint's tensors to what kernels multiply with, and their bytes beforehand.

Called when a runner is made from a checkpoint. Packs on the CPU, some rows at a time; whoever loads puts the tensors
where they are needed (`LinearWeight.placed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_pack import check_parts, float_vector, stacked_bias
from naru_worker.adapters.ops.cuda.block_formats import KIND_OF_FORMAT, unpack_rows
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupKind, GroupRows, group_bytes
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.tensor_format import row_bytes

_STEP_ELEMENTS = 1 << 21
"""Elements that are packed at once: what lies beside a matrix while it is packed."""
_FLOATS: dict[TensorFormat, tuple[type[np.generic], torch.dtype]] = {
    "f32": (np.uint32, torch.float32),
    "f16": (np.uint16, torch.float16),
    "bf16": (np.uint16, torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A plain matrix, (out_features, in_features)."""

    values: Tensor

    @property
    def num_rows(self) -> int:
        """out_features."""
        return int(self.values.shape[0])

    def placed(self, place: Callable[[Tensor], Tensor]) -> DenseRows:
        """The same with its tensor where `place` puts it."""
        return DenseRows(place(self.values))


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear layer: runs of rows, one below the other, each of one kind."""

    num_rows: int
    num_columns: int
    segments: tuple[DenseRows | GroupRows, ...]
    bias: Tensor | None
    """(num_rows,), the type of the activations."""

    def placed(self, place: Callable[[Tensor], Tensor]) -> LinearWeight:
        """The same with each tensor where `place` puts it: on a device, or into an arena."""
        bias = None if self.bias is None else place(self.bias)
        return replace(self, segments=tuple(segment.placed(place) for segment in self.segments), bias=bias)


def packed_bytes(parts: Sequence[RawTensor], biases: Sequence[RawTensor | None], dtype: torch.dtype) -> int:
    """Bytes of the tensors that `pack_matrix` makes, from formats and shapes alone.

    Raises:
        LoadError: see `pack_matrix`; nothing is read of the data but its length.
    """
    columns = check_parts(parts)
    rows = sum(part.shape[0] for part in parts)
    total = rows * dtype.itemsize if any(bias is not None for bias in biases) else 0
    for part in parts:
        kind = KIND_OF_FORMAT.get(part.format)
        if kind is None:
            total += math.prod(part.shape) * dtype.itemsize
        else:
            total += group_bytes(kind, part.shape[0], columns)
    return total


def pack_matrix(parts: Sequence[RawTensor], biases: Sequence[RawTensor | None], dtype: torch.dtype) -> LinearWeight:
    """Stacks parts by rows; their formats may differ. A missing bias beside a present one counts as zero.

    Args:
        parts: Float formats are stored as `dtype`, quantized ones in groups.
        biases: One for each part.
        dtype: The type of the activations.

    Returns:
        Tensors on the CPU, which share nothing with the parts.

    Raises:
        LoadError: the parts do not fit one another, or a value does not fit its type.
    """
    columns = check_parts(parts)
    segments: list[DenseRows | GroupRows] = []
    for kind, group in groupby(parts, lambda part: KIND_OF_FORMAT.get(part.format)):
        run = list(group)
        segments.append(_dense(run, columns, dtype) if kind is None else _grouped(run, columns, kind))
    bias = stacked_bias(parts, biases)
    return LinearWeight(
        num_rows=sum(part.shape[0] for part in parts),
        num_columns=columns,
        segments=tuple(segments),
        bias=None if bias is None else _converted(torch.from_numpy(bias), dtype, parts[0].name),
    )


def pack_vector(tensor: RawTensor) -> Tensor:
    """A vector (norm weight or bias) as float32, on the CPU.

    Raises:
        LoadError: it is no float vector, or its data is short.
    """
    return torch.from_numpy(float_vector(tensor))


def _dense(run: Sequence[RawTensor], columns: int, dtype: torch.dtype) -> DenseRows:
    values = torch.empty((sum(part.shape[0] for part in run), columns), dtype=dtype)
    start = 0
    for part in run:
        bits, source = _FLOATS[part.format]
        rows = np.frombuffer(part.data, bits).reshape(part.shape)
        for first, last in _steps(part):
            piece = torch.from_numpy(rows[first:last].copy()).view(source)
            values[start + first : start + last] = _converted(piece, dtype, part.name)
        start += part.shape[0]
    return DenseRows(values)


def _converted(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    if not torch.isfinite(converted).all():
        raise LoadError(f"tensor {name!r} has values that {str(dtype).removeprefix('torch.')} cannot hold")
    return converted


def _grouped(run: Sequence[RawTensor], columns: int, kind: GroupKind) -> GroupRows:
    num_rows = sum(part.shape[0] for part in run)
    packed = empty_rows(kind, num_rows, columns)
    start = 0
    for part in run:
        rows = np.frombuffer(part.data, np.uint8).reshape(part.shape[0], row_bytes(part.format, columns))
        for first, last in _steps(part):
            integers, scales, minimums = unpack_rows(part.format, rows[first:last])
            fill_rows(packed, start + first, integers, scales, minimums, part.name)
        start += part.shape[0]
    return packed


def _steps(part: RawTensor) -> list[tuple[int, int]]:
    """Runs of rows that are packed at once."""
    rows = max(1, _STEP_ELEMENTS // part.shape[1])
    return [(first, min(first + rows, part.shape[0])) for first in range(0, part.shape[0], rows)]


def stacked_rows(parts: Sequence[GroupRows]) -> GroupRows:
    """Matrices of one kind, one below the other; copies.

    Raises:
        LoadError: their kinds or columns differ.
    """
    first = parts[0]
    if any((part.kind, part.num_columns) != (first.kind, first.num_columns) for part in parts):
        raise LoadError("matrices that are quantized in different ways cannot be stacked into one")
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupRows(
        kind=first.kind,
        num_rows=sum(part.num_rows for part in parts),
        num_columns=first.num_columns,
        quants=torch.cat([part.quants for part in parts], dim=1),
        scales=torch.cat([part.scales for part in parts], dim=1),
        minimums=torch.cat(minimums, dim=1) if minimums else None,
    )


def empty_rows(kind: GroupKind, num_rows: int, num_columns: int) -> GroupRows:
    """A matrix to be filled, on the CPU: integers and scales of 0, which is what padding wants."""
    groups = kind.num_groups(num_columns)
    return GroupRows(
        kind=kind,
        num_rows=num_rows,
        num_columns=num_columns,
        quants=torch.zeros((kind.num_chunks(num_columns), num_rows, kind.chunk_bytes), dtype=torch.uint8),
        scales=torch.zeros((groups, num_rows), dtype=kind.scale_type),
        minimums=torch.zeros((groups, num_rows), dtype=kind.scale_type) if kind.has_minimum else None,
    )


def fill_rows(
    packed: GroupRows,
    start: int,
    integers: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    minimums: npt.NDArray[np.float32] | None,
    name: str,
) -> None:
    """Writes some rows.

    Args:
        packed: Mutated.
        start: The first row to write.
        integers: (rows, num_columns), one a byte.
        scales: (rows, groups).
        minimums: (rows, groups), where the kind has them.
        name: Of the tensor, for errors.

    Raises:
        LoadError: a scale or minimum is not finite as 16 bits.
    """
    kind, stop = packed.kind, start + len(integers)
    padding = packed.quants.shape[0] * kind.chunk_columns - integers.shape[1]
    if padding:
        integers = np.pad(integers, ((0, 0), (0, padding)))
    chunks = integers.reshape(len(integers), -1, 8 // kind.bits, kind.chunk_bytes)
    bytes_ = chunks[:, :, 0] if kind.bits == 8 else chunks[:, :, 0] | (chunks[:, :, 1] << 4)
    packed.quants[:, start:stop] = torch.from_numpy(bytes_).transpose(0, 1)
    for target, values in ((packed.scales, scales), (packed.minimums, minimums)):
        if target is not None and values is not None:
            turned = torch.from_numpy(np.ascontiguousarray(values.T))
            target[: len(turned), start:stop] = _converted(turned.float(), kind.scale_type, name)
