"""The `Checkpoint` over mapped files: canonical names, checked shapes, rows cut and turned on demand.

Built by the openers of each file kind; read by the decoder's loader. Tensors that need no turning are
views of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.lazy_tensor import LazyTensor
from naru_worker.adapters.weights.tensor_format import BLOCKS, row_bytes, tensor_bytes
from naru_worker.core.model_config import ModelConfig
from naru_worker.core.weight_layout import expected_shapes
from naru_worker.core.weight_names import TensorPlace

FINGERPRINT_CHUNK_BYTES = 64 * 1024
"""The fingerprint hashes one sum for each piece of this size."""


class WeightFile(Protocol):
    """One opened file of tensors."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def view(self) -> memoryview:
        """Its bytes."""

    def close(self) -> None:
        """Unmaps it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    place: TensorPlace
    source: RawTensor


class MappedCheckpoint:
    """A validated model: every tensor the decoder will ask for is there, of the right shape and a known format."""

    def __init__(
        self,
        config: ModelConfig,
        chat_template: str,
        files: Sequence[WeightFile],
        tensors: Mapping[str, RawTensor],
        place_of: Callable[[ModelConfig, str], TensorPlace],
        unusable: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Checks every tensor; `place_of` tells where each canonical one lies in `tensors`.

        `unusable` are tensors of a dtype that cannot be served: an error only if the model needs them.

        Raises:
            LoadError: a tensor is missing or does not fit the config.
        """
        self.config = config
        self.chat_template = chat_template
        self._files = tuple(files)
        self._entries: dict[str, _Entry] = {}
        used: set[str] = set()
        for name, shape in expected_shapes(config).items():
            place = place_of(config, name)
            source = tensors.get(place.source)
            if source is None:
                dtype = unusable.get(place.source)
                problem = "is missing" if dtype is None else f"is {dtype}; it must be F32, F16 or BF16"
                raise LoadError(f"{self._where}: tensor {place.source!r} {problem} ({name})", param=place.source)
            if place.part is not None:
                source = self._part(source, *place.part, shape)
            self._check_shape(place, source, shape, needs_floats=len(shape) == 1 or name.endswith(".router"))
            used.add(place.source)
            self._entries[name] = _Entry(place, source)
        self.ignored_tensors = tuple(sorted((set(tensors) | set(unusable)) - used))
        """Names of the file's tensors that the model has no use for; the caller may log them."""

    @cached_property
    def revision(self) -> str:
        """Content identity over all bytes of all files; see `content_revision`."""
        return content_revision(self._files)

    def get(self, name: str) -> RawTensor:
        """One tensor by its canonical name.

        Raises:
            LoadError: there is no such tensor.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise LoadError(f"{self._where}: has no tensor for {name!r}", param=name)
        return _place(name, entry.place, entry.source)

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._entries

    def close(self) -> None:
        """Unmaps the files; RawTensors of it are dead afterwards."""
        self._entries.clear()
        for file in self._files:
            file.close()

    @property
    def _where(self) -> str:
        first = self._files[0].path
        return str(first if len(self._files) == 1 else first.parent)

    def _part(self, source: RawTensor, index: int, count: int, expected: tuple[int, ...]) -> RawTensor:
        """One of `count` tensors that lie one behind the other in the file's: a view."""
        if len(source.shape) != len(expected) + 1 or source.shape[0] != count:
            raise LoadError(
                f"{self._where}: tensor {source.name!r} has shape {source.shape}, but the config needs "
                f"{(count, *expected)}",
                param=source.name,
            )
        size = tensor_bytes(source.format, source.shape[1:])
        return RawTensor(source.name, source.format, source.shape[1:], source.data[index * size : (index + 1) * size])

    def _check_shape(
        self, place: TensorPlace, source: RawTensor, expected: tuple[int, ...], *, needs_floats: bool
    ) -> None:
        shape = source.shape
        if place.transposed:
            if BLOCKS[source.format][0] != 1:
                raise LoadError(
                    f"{self._where}: tensor {place.source!r} is {source.format}; it must be f32, f16 or bf16",
                    param=place.source,
                )
            shape = shape[::-1]
        full = expected if place.rows is None else (3 * expected[0], *expected[1:])
        if shape != full:
            raise LoadError(
                f"{self._where}: tensor {place.source!r} has shape {source.shape}, but the config needs "
                f"{full[::-1] if place.transposed else full}",
                param=place.source,
            )
        if needs_floats and BLOCKS[source.format][0] != 1:
            raise LoadError(
                f"{self._where}: tensor {place.source!r} is {source.format}; a vector or a router must be f32, f16 or "
                "bf16",
                param=place.source,
            )


def content_revision(files: Sequence[WeightFile]) -> str:
    """Content identity over all bytes of all files, 32 hex digits; equal on every machine.

    A sum for each 64 KiB and one hash over the sums: at memory speed, and any single change shows. It tells revisions
    apart; it is no proof against forgery.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(len(file.view).to_bytes(8, "little"))
        digest.update(_chunk_sums(file.view))
    return digest.hexdigest()


def _place(name: str, place: TensorPlace, source: RawTensor) -> RawTensor:
    if isinstance(source, LazyTensor):
        whole = source.renamed(name)
        return whole if place.rows is None else whole.cut(range(*place.rows), range(source.shape[1]))
    shape, data = source.shape, source.data
    if place.transposed:
        element = BLOCKS[source.format][1]
        items: npt.NDArray[np.generic] = np.frombuffer(data, np.dtype(f"u{element}")).reshape(shape)
        if place.rows is not None:
            items = items[:, place.rows[0] : place.rows[1]]
        turned = np.ascontiguousarray(items.T)
        return RawTensor(name, source.format, turned.shape, turned.data.cast("B").toreadonly())
    # A vector's rows are its elements.
    stride = row_bytes(source.format, shape[1]) if len(shape) == 2 else BLOCKS[source.format][1]
    if place.rows is not None:
        start, stop = place.rows
        shape, data = (stop - start, *shape[1:]), data[start * stride : stop * stride]
    if place.num_rope_heads:
        data = _unpermute(data, shape[0], stride, place.num_rope_heads)
    return RawTensor(name, source.format, shape, _aligned(data, source.format))


def _unpermute(data: memoryview, num_rows: int, stride: int, num_heads: int) -> memoryview:
    """Interleaved rotary rows (pairs side by side) to half-rotation order (pairs half a head apart)."""
    rows = np.frombuffer(data, np.uint8).reshape(num_heads, num_rows // num_heads // 2, 2, stride)
    turned = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
    return turned.data.toreadonly()


def _aligned(data: memoryview, tensor_format: TensorFormat) -> memoryview:
    """The data, copied if its elements start at odd addresses (safetensors may put an F32 after a BOOL)."""
    elements, size = BLOCKS[tensor_format]
    address = np.frombuffer(data, np.uint8).ctypes.data if data else 0
    return memoryview(bytes(data)) if elements == 1 and address % size else data


def _chunk_sums(view: memoryview) -> bytes:
    words = np.frombuffer(view, np.uint64, len(view) // 8)
    step = FINGERPRINT_CHUNK_BYTES // 8
    whole = len(words) // step * step
    sums = words[:whole].reshape(-1, step).sum(axis=1, dtype=np.uint64)
    rest: bytes = words[whole:].tobytes()
    return bytes(sums.tobytes()) + rest + bytes(view[len(words) * 8 :])
