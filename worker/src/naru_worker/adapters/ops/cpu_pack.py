"""Weights of the CPU backend: checks on the way in, sizes before loading, packing into the native arena.

Called when a runner is made from a checkpoint. Does not know the decoder's graph.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_transcode import native_tensor
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.tensor_format import BLOCKS, tensor_bytes
from naru_worker.core.model_config import ModelConfig

FORMAT_NUMBERS: dict[TensorFormat, int] = {
    "f32": 0,
    "f16": 1,
    "bf16": 2,
    "q4_0": 3,
    "q4_1": 4,
    "q8_0": 5,
    "q4_k": 6,
    "q6_k": 7,
}
"""`Format` of `native/src/matrix.h`: each of them has one packed form, which holds the same numbers exactly. Other
formats are changed into one of these first (`cpu_transcode`)."""

_ALIGN_BYTES = 64
_BIAS_PADDING = 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A linear weight in native memory."""

    id: int
    num_rows: int
    num_columns: int
    wants_floats: bool
    """Some rows are float: they need float activations."""
    wants_quants: bool
    """Some rows are quantized: they need quantized activations."""


def aligned(num_bytes: int) -> int:
    """Rounded up as the arena does."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def check_served(config: ModelConfig) -> None:
    """Refuses what native code has no instruction for.

    Raises:
        LoadError: names it, and who can serve it.
    """
    if config.experts is not None:
        raise LoadError(
            f"the model ({config.architecture}) has a mixture of experts, which the cpu backend cannot serve; use a "
            "pool of GPUs (backend cuda), or backend ref",
            param="backend",
        )


def check_parts(parts: Sequence[RawTensor]) -> int:
    """Number of columns that the parts share.

    Raises:
        LoadError: a part is no matrix, its columns differ or break a quantization block, or its data is short.
    """
    columns = parts[0].shape[-1] if parts[0].shape else 0
    for part in parts:
        if len(part.shape) != 2 or min(part.shape) < 1 or part.shape[1] != columns:
            raise LoadError(f"tensor {part.name!r} has shape {part.shape!r}; a matrix with {columns} columns is needed")
        if math.prod(part.shape) >= 2**31:
            raise LoadError(f"tensor {part.name!r} has shape {part.shape!r}; fewer than 2**31 elements are supported")
        if columns % BLOCKS[part.format][0]:
            raise LoadError(
                f"tensor {part.name!r} has {columns} columns, no multiple of the {BLOCKS[part.format][0]} of its "
                f"format {part.format}"
            )
        needed = tensor_bytes(part.format, part.shape)
        if part.num_bytes != needed:
            raise LoadError(f"tensor {part.name!r} has {part.num_bytes} bytes of data; {needed} are needed")
    return columns


def float_vector(tensor: RawTensor) -> npt.NDArray[np.float32]:
    """A one-dimensional tensor as float32.

    Raises:
        LoadError: it is quantized, not one-dimensional, or its data is short.
    """
    if len(tensor.shape) != 1 or tensor.format not in ("f32", "f16", "bf16"):
        raise LoadError(
            f"tensor {tensor.name!r} is {tensor.format} of shape {tensor.shape!r}; a float vector is needed"
        )
    if tensor.data.nbytes != tensor_bytes(tensor.format, tensor.shape):
        raise LoadError(f"tensor {tensor.name!r} has {tensor.data.nbytes} bytes of data for shape {tensor.shape!r}")
    if tensor.format == "bf16":
        bits = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return np.frombuffer(tensor.data, np.float16 if tensor.format == "f16" else np.float32).astype(np.float32)


def stacked_bias(parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> npt.NDArray[np.float32] | None:
    """Biases one below the other, zeros where a part has none; None when no part has one.

    Raises:
        LoadError: a bias does not fit its part.
    """
    if all(bias is None for bias in biases):
        return None
    pieces: list[npt.NDArray[np.float32]] = []
    for part, bias in zip(parts, biases, strict=True):
        piece = np.zeros(part.shape[0], np.float32) if bias is None else float_vector(bias)
        if bias is not None and len(piece) != part.shape[0]:
            raise LoadError(f"tensor {bias.name!r} has shape {bias.shape!r}; {part.shape[0]} values are needed")
        pieces.append(piece)
    return np.ascontiguousarray(np.concatenate(pieces))


def matrix_bytes(library: ctypes.CDLL, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> int:
    """Bytes of the arena that `pack_matrix` will take.

    Raises:
        LoadError: see `check_parts`.
    """
    columns = check_parts(parts)
    parts = [native_tensor(part) for part in parts]
    total = sum(
        aligned(library.naru_segment_bytes(FORMAT_NUMBERS[part.format], part.shape[0], columns)) for part in parts
    )
    if any(bias is not None for bias in biases):
        total += aligned((sum(part.shape[0] for part in parts) + _BIAS_PADDING) * 4)
    return total


def pack_matrix(
    library: ctypes.CDLL, model: int, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]
) -> PackedMatrix:
    """Copies the parts, interleaved, into the model's arena.

    Raises:
        LoadError: the parts do not fit one another, or the arena is full (the size was computed for other parts).
    """
    columns = check_parts(parts)
    bias = stacked_bias(parts, biases)
    parts = [native_tensor(part) for part in parts]
    arrays = [np.frombuffer(part.data, np.uint8) for part in parts]
    count = len(parts)
    formats = (ctypes.c_int32 * count)(*(FORMAT_NUMBERS[part.format] for part in parts))
    rows = (ctypes.c_int32 * count)(*(part.shape[0] for part in parts))
    data = (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays))
    number = library.naru_add_matrix(
        model, columns, count, formats, rows, data, None if bias is None else bias.ctypes.data
    )
    if number < 0:
        raise LoadError(f"tensor {parts[0].name!r} and its {count - 1} neighbours do not fit the memory set aside")
    quantized = [part.format.startswith("q") for part in parts]
    return PackedMatrix(
        id=number,
        num_rows=sum(part.shape[0] for part in parts),
        num_columns=columns,
        wants_floats=not all(quantized),
        wants_quants=any(quantized),
    )


class WeightSizer:
    """Adds up what a checkpoint's weights will take; the weight half of the protocol only."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._matrices: set[str] = set()
        self.arena_bytes = 0
        self.vector_bytes = 0

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> None:
        """Counts a matrix; one of the same single tensor is counted once."""
        if len(parts) == 1 and biases[0] is None:
            if parts[0].name in self._matrices:
                return
            self._matrices.add(parts[0].name)
        self.arena_bytes = aligned(self.arena_bytes) + matrix_bytes(self._library, parts, biases)

    def vector(self, tensor: RawTensor) -> None:
        """Counts a vector."""
        self.vector_bytes += 4 * tensor.shape[0]

    def table(self, tensor: RawTensor) -> None:
        """Counts a table, which shares the storage of a matrix."""
        self.matrix([tensor], [None])


class PackedWeights:
    """Packs one checkpoint for one native model; the weight half of the protocol only."""

    def __init__(self, library: ctypes.CDLL, model: int) -> None:
        self._library = library
        self._model = model
        self._matrices: dict[str, PackedMatrix] = {}

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> PackedMatrix:
        """Packs the parts, one below the other."""
        shared = len(parts) == 1 and biases[0] is None
        if shared and parts[0].name in self._matrices:
            return self._matrices[parts[0].name]
        packed = pack_matrix(self._library, self._model, parts, biases)
        if shared:
            self._matrices[parts[0].name] = packed
        return packed

    def vector(self, tensor: RawTensor) -> int:
        """Copies a float vector; returns its number."""
        values = float_vector(tensor)
        return int(self._library.naru_add_vector(self._model, values.ctypes.data, len(values)))

    def table(self, tensor: RawTensor) -> PackedMatrix:
        """A matrix whose rows are looked up: stored once when it is also the head."""
        return self.matrix([tensor], [None])
