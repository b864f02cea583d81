"""A packed image in memory, or mapped from a file: what `adapters/images` offers, without its cache and checks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.models.decoder import load_weights
from naru_worker.adapters.ops.cpu_pack import FORMAT_NUMBERS, float_vector, stacked_bias
from naru_worker.adapters.ops.native_lib import load_variant
from naru_worker.adapters.ops.protocol import RawTensor
from naru_worker.adapters.ops.weights_image import MatrixPlace, SegmentPlace
from naru_worker.core.model_config import ModelConfig


@dataclass
class MemoryImage:
    """Implements `WeightsImage` over an array."""

    config: ModelConfig
    data: npt.NDArray[np.uint8]
    matrices: dict[tuple[str, ...], MatrixPlace]
    vectors: dict[str, tuple[int, int]]
    """Offset and length."""

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    def has(self, name: str) -> bool:
        return name in self.vectors or any(name in names for names in self.matrices)

    def matrix(self, names: tuple[str, ...]) -> MatrixPlace:
        if names not in self.matrices:
            raise LoadError(f"the image has no matrix {names!r}")
        return self.matrices[names]

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        if name not in self.vectors:
            raise LoadError(f"the image has no vector {name!r}")
        offset, length = self.vectors[name]
        return self.data[offset : offset + 4 * length].view(np.float32)


def image_of(checkpoint: Any, path: Path | None = None) -> MemoryImage:
    """The image of a checkpoint, weights in the order of the decoder; mapped from a new file when a path is given."""
    writer = _Writer()
    load_weights(writer, checkpoint)  # type: ignore[arg-type]  # only the weight half of the protocol is called
    if path is None:
        space = np.zeros(writer.num_bytes + 64, np.uint8)
        start = -space.ctypes.data % 64
        data = space[start : start + writer.num_bytes]
        for offset, piece in writer.pieces:
            data[offset : offset + piece.nbytes] = piece
    else:
        with path.open("wb") as file:
            for offset, piece in writer.pieces:
                file.seek(offset)
                file.write(piece.data)
            file.truncate(writer.num_bytes)
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    return MemoryImage(checkpoint.config, data, writer.matrices, writer.vectors)


@dataclass
class _Writer:
    matrices: dict[tuple[str, ...], MatrixPlace] = field(default_factory=dict)
    vectors: dict[str, tuple[int, int]] = field(default_factory=dict)
    pieces: list[tuple[int, npt.NDArray[np.uint8]]] = field(default_factory=list)
    num_bytes: int = 0

    def matrix(self, parts: Sequence[RawTensor], biases: Sequence[RawTensor | None]) -> None:
        names = tuple(part.name for part in parts)
        if names in self.matrices:
            return
        columns = parts[0].shape[1]
        segments = []
        for part in parts:
            kind, rows = FORMAT_NUMBERS[part.format], part.shape[0]
            library = load_variant("plain")
            packed = np.zeros(library.naru_segment_bytes(kind, rows, columns), np.uint8)
            file = np.frombuffer(part.data, np.uint8)
            library.naru_pack_segment(kind, rows, columns, file.ctypes.data, packed.ctypes.data)
            segments.append(SegmentPlace(kind, rows, self._put(packed), packed.nbytes))
        bias = stacked_bias(parts, biases)
        offset = -1 if bias is None else self._put(np.concatenate([bias, np.zeros(16, np.float32)]).view(np.uint8))
        self.matrices[names] = MatrixPlace(columns, tuple(segments), offset)

    def vector(self, tensor: RawTensor) -> None:
        values = float_vector(tensor)
        self.vectors[tensor.name] = (self._put(values.view(np.uint8)), len(values))

    def table(self, tensor: RawTensor) -> None:
        self.matrix([tensor], [None])

    def _put(self, piece: npt.NDArray[np.uint8]) -> int:
        offset = -(-self.num_bytes // 64) * 64
        self.pieces.append((offset, piece))
        self.num_bytes = offset + piece.nbytes
        return offset
