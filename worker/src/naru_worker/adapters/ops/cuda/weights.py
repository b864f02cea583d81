"""Weights of the GPU backend: from a checkpoint's tensors to what kernels multiply with, and their bytes beforehand.

Called when a runner is made from a checkpoint. Packs on the CPU, some rows at a time; whoever loads puts the tensors
where they are needed (`LinearWeight.placed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_pack import check_parts, float_vector, stacked_bias
from naru_worker.adapters.ops.cuda.block_formats import KIND_OF_FORMAT, unpack_rows
from naru_worker.adapters.ops.cuda.kernels.fp8_linear import Fp8Rows, fp8_obstacle
from naru_worker.adapters.ops.cuda.kernels.group_layout import GroupKind, GroupRows, group_bytes
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.lazy_tensor import row_steps, rows_of

Capability = tuple[int, int]
"""Compute capability of a GPU."""
NO_FP8: Capability = (8, 0)
"""Of a GPU that multiplies 8-bit floats with 16-bit activations only."""
_SCALE_BYTES = 4
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


Segment = DenseRows | GroupRows | Fp8Rows


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear layer: runs of rows, one below the other, each of one kind."""

    num_rows: int
    num_columns: int
    segments: tuple[Segment, ...]
    bias: Tensor | None
    """(num_rows,), the type of the activations."""

    @property
    def takes_fp8(self) -> bool:
        """Whether all of it is multiplied by activations of 8 bits: whoever makes them for it alone may round them."""
        return all(isinstance(segment, Fp8Rows) for segment in self.segments)

    def placed(self, place: Callable[[Tensor], Tensor]) -> LinearWeight:
        """The same with each tensor where `place` puts it: on a device, or into an arena."""
        bias = None if self.bias is None else place(self.bias)
        return replace(self, segments=tuple(segment.placed(place) for segment in self.segments), bias=bias)


Layout = GroupKind | Literal["dense", "fp8"]
"""What kind of segment a matrix becomes."""


def layout_of(part: RawTensor, capability: Capability) -> Layout:
    """How a matrix will lie on a GPU: of its format and shape alone."""
    if part.format == "e4m3_row" and fp8_obstacle(capability, *part.shape) is None:
        return "fp8"
    return KIND_OF_FORMAT.get(part.format, "dense")


def why_not_fp8(part: RawTensor, capability: Capability) -> str | None:
    """Why a matrix of 8-bit floats is not multiplied as such, as a sentence for people; None: it is, or is another."""
    if part.format == "e4m3_row":
        return fp8_obstacle(capability, *part.shape)
    if part.format in ("e4m3_b32", "e4m3_b128"):
        return "scales of blocks of columns: FP8 weights are multiplied with 16-bit activations"
    return None


def num_fp8_rows(parts: Sequence[RawTensor], capability: Capability) -> int:
    """Of the tallest run that `pack_matrix` makes of 8-bit floats to be multiplied as such; 0: of none."""
    runs = groupby(parts, lambda part: layout_of(part, capability))
    return max((sum(part.shape[0] for part in run) for layout, run in runs if layout == "fp8"), default=0)


def packed_bytes(
    parts: Sequence[RawTensor], biases: Sequence[RawTensor | None], dtype: torch.dtype, capability: Capability = NO_FP8
) -> int:
    """Bytes of the tensors that `pack_matrix` makes, from formats and shapes alone.

    Raises:
        LoadError: see `pack_matrix`; nothing is read of the data but its length.
    """
    columns = check_parts(parts)
    rows = sum(part.shape[0] for part in parts)
    total = rows * dtype.itemsize if any(bias is not None for bias in biases) else 0
    for part in parts:
        layout = layout_of(part, capability)
        if layout == "dense":
            total += math.prod(part.shape) * dtype.itemsize
        elif layout == "fp8":
            total += math.prod(part.shape) + _SCALE_BYTES * part.shape[0]
        else:
            total += group_bytes(layout, part.shape[0], columns)
    return total


def pack_matrix(
    parts: Sequence[RawTensor], biases: Sequence[RawTensor | None], dtype: torch.dtype, capability: Capability = NO_FP8
) -> LinearWeight:
    """Stacks parts by rows; their formats may differ. A missing bias beside a present one counts as zero.

    Args:
        parts: Float formats are stored as `dtype`, quantized ones in groups.
        biases: One for each part.
        dtype: The type of the activations.
        capability: Of the GPU that will multiply.

    Returns:
        Tensors on the CPU, which share nothing with the parts.

    Raises:
        LoadError: the parts do not fit one another, or a value does not fit its type.
    """
    columns = check_parts(parts)
    segments: list[Segment] = []
    for layout, group in groupby(parts, lambda part: layout_of(part, capability)):
        run = list(group)
        if layout == "dense":
            segments.append(_dense(run, columns, dtype))
        elif layout == "fp8":
            segments.append(_fp8(run, columns))
        else:
            segments.append(_grouped(run, columns, layout))
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
        for first, last in row_steps(part):
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
        for first, last in row_steps(part):
            integers, scales, minimums = unpack_rows(part.format, rows_of(part, first, last))
            fill_rows(packed, start + first, integers, scales, minimums, part.name)
        start += part.shape[0]
    return packed


def _fp8(run: Sequence[RawTensor], columns: int) -> Fp8Rows:
    num_rows, start = sum(part.shape[0] for part in run), 0
    values = torch.empty((num_rows, columns), dtype=torch.uint8)
    scales = torch.empty(num_rows, dtype=torch.float32)
    for part in run:
        for first, last in row_steps(part):
            codes, factors, _ = unpack_rows(part.format, rows_of(part, first, last))
            values[start + first : start + last] = torch.from_numpy(codes)
            scales[start + first : start + last] = torch.from_numpy(factors[:, 0].copy())
        start += part.shape[0]
    return Fp8Rows(values.view(torch.float8_e4m3fn), scales)


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
