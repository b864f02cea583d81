"""Weights of the CPU backend where an image has them: checked, pointed at, never copied.

Called when a runner is made from an image. Nothing an image says is believed before it is checked here: native code
reads through these addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.cpu_pack import FORMAT_NUMBERS, PackedMatrix
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.ops.weights_image import MatrixPlace, SegmentPlace, WeightsImage
from naru_worker.adapters.weights.tensor_format import BLOCKS
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.weight_layout import expected_shapes

_ALIGN_BYTES = 64
_BIAS_PADDING = 16
_BLOCK_COLUMNS = {number: BLOCKS[name][0] for name, number in FORMAT_NUMBERS.items()}
_FIRST_QUANTIZED = FORMAT_NUMBERS["q4_0"]
_NO_DATA = memoryview(b"")


class NamedTensors:
    """What the decoder asks a checkpoint for, from the config alone: names and shapes without data."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = expected_shapes(config)

    def get(self, name: str) -> RawTensor:
        """A tensor's name and shape."""
        return RawTensor(name, "f32", self._shapes[name], _NO_DATA)

    def has(self, name: str) -> bool:
        """Whether a model of this config has the tensor."""
        return name in self._shapes


class UnloadedWeights:
    """Weights of which nothing is known but the shape, to measure a model; the weight half of the protocol only."""

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> PackedMatrix:
        """Parts one below the other."""
        return PackedMatrix(
            id=0,
            num_rows=sum(part.shape[0] for part in parts),
            num_columns=parts[0].shape[1],
            wants_floats=True,
            wants_quants=True,
        )

    def vector(self, tensor: RawTensor) -> int:
        """Any number."""
        return 0

    def table(self, tensor: RawTensor) -> PackedMatrix:
        """A matrix."""
        return self.matrix([tensor], [None])


class ImageWeights:
    """Points one native model at the weights of one image; the weight half of the protocol only."""

    def __init__(self, library: ctypes.CDLL, model: int, image: WeightsImage) -> None:
        self._library = library
        self._model = model
        self._image = image
        self._address = image.address
        self._num_bytes = image.num_bytes
        self._matrices: dict[str, PackedMatrix] = {}
        self._segment_bytes: dict[tuple[int, int, int], int] = {}
        if self._address % _ALIGN_BYTES:
            raise LoadError(f"the image is mapped at address {self._address!r}, no multiple of {_ALIGN_BYTES}")

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> PackedMatrix:
        """A stack of parts, where it lies.

        Raises:
            LoadError: the image has none, or what it says of it does not fit the config or the image.
        """
        name = parts[0].name
        if len(parts) == 1 and name in self._matrices:
            return self._matrices[name]
        place = self._image.matrix(tuple(part.name for part in parts))
        end = self._check(place, parts, any(bias is not None for bias in biases))
        segments, count = place.segments, len(parts)
        integers = ctypes.c_int32 * count
        number = self._library.naru_add_matrix_view(
            self._model,
            place.num_columns,
            count,
            integers(*(segment.format for segment in segments)),
            integers(*(segment.num_rows for segment in segments)),
            (ctypes.c_void_p * count)(*(self._address + segment.offset for segment in segments)),
            None if place.bias_offset < 0 else self._address + place.bias_offset,
            end,
        )
        assert number >= 0, "the decoder stacks fewer parts than native code takes"
        quantized = [segment.format >= _FIRST_QUANTIZED for segment in segments]
        packed = PackedMatrix(
            id=number,
            num_rows=sum(segment.num_rows for segment in segments),
            num_columns=place.num_columns,
            wants_floats=not all(quantized),
            wants_quants=any(quantized),
        )
        if count == 1:
            self._matrices[name] = packed
        return packed

    def vector(self, tensor: RawTensor) -> int:
        """A float vector, where it lies; returns its number.

        Raises:
            LoadError: the image has none, of another length, or elsewhere.
        """
        values = self._image.vector(tensor.name)
        if values.dtype != np.float32 or values.shape != tensor.shape or not values.flags.c_contiguous:
            raise LoadError(
                f"vector {tensor.name!r} of the image is {values.dtype!s} of shape {values.shape!r}; "
                f"float32 of shape {tensor.shape!r} is needed"
            )
        offset = values.__array_interface__["data"][0] - self._address
        if offset % 4 or offset < 0 or offset + values.nbytes > self._num_bytes:
            raise LoadError(
                f"vector {tensor.name!r} lies at {offset!r}, outside the {self._num_bytes} bytes of its image"
            )
        return int(self._library.naru_add_vector_view(self._model, self._address + offset, offset + values.nbytes))

    def table(self, tensor: RawTensor) -> PackedMatrix:
        """A matrix whose rows are looked up: the same one when it is also the head."""
        return self.matrix([tensor], [None])

    def _check(self, place: MatrixPlace, parts: Sequence[RawTensor], has_bias: bool) -> int:
        """Where the last byte of a matrix ends."""
        names = ", ".join(part.name for part in parts)
        if len(place.segments) != len(parts):
            raise LoadError(f"matrix {names!r} of the image has {len(place.segments)} parts; {len(parts)} are needed")
        if has_bias != (place.bias_offset >= 0) or place.bias_offset < -1:
            raise LoadError(
                f"matrix {names!r} of the image has its bias at {place.bias_offset!r}; "
                f"the config asks for {'one' if has_bias else 'none'}"
            )
        end = 0
        for part, segment in zip(parts, place.segments, strict=True):
            if (segment.num_rows, place.num_columns) != part.shape:
                raise LoadError(
                    f"tensor {part.name!r} of the image has shape {(segment.num_rows, place.num_columns)!r}; "
                    f"{part.shape!r} is needed"
                )
            needed = self._needed(part.name, segment, place.num_columns)
            if segment.num_bytes != needed:
                raise LoadError(f"tensor {part.name!r} of the image has {segment.num_bytes!r} bytes, not {needed}")
            end = max(end, self._end(part.name, segment.offset, needed))
        if has_bias:
            rows = sum(segment.num_rows for segment in place.segments)
            end = max(end, self._end(f"{names} (bias)", place.bias_offset, 4 * (rows + _BIAS_PADDING)))
        return end

    def _needed(self, name: str, segment: SegmentPlace, columns: int) -> int:
        key = (segment.format, segment.num_rows, columns)
        if key not in self._segment_bytes:
            block = _BLOCK_COLUMNS.get(segment.format)
            if block is None or columns % block or segment.num_rows * columns >= 2**31:
                raise LoadError(
                    f"tensor {name!r} of the image has format {segment.format!r} and shape "
                    f"{(segment.num_rows, columns)!r}, which the cpu backend cannot read"
                )
            self._segment_bytes[key] = self._library.naru_segment_bytes(*key)
        return self._segment_bytes[key]

    def _end(self, name: str, offset: int, num_bytes: int) -> int:
        if offset % _ALIGN_BYTES or not 0 <= offset <= self._num_bytes - num_bytes:
            raise LoadError(
                f"tensor {name!r} lies at {offset!r}; a multiple of {_ALIGN_BYTES} with {num_bytes} bytes behind it is "
                f"needed, in an image of {self._num_bytes} bytes"
            )
        return offset + num_bytes
