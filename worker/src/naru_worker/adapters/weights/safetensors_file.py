"""Reads safetensors files: a checked header and zero-copy tensors.

Used when a model folder is opened. The file is untrusted: sizes are checked before they are used, tensors must fill the
data without gap or overlap. Does not know names or shapes a model needs.

Source: the safetensors format description (huggingface/safetensors, README).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

from naru_proto.errors import LoadError
from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.adapters.weights.mapped_file import MappedFile
from naru_worker.adapters.weights.model_folder import parse_json_object
from naru_worker.core.fields import shown

MAX_HEADER_BYTES = 32 * 2**20
"""Real headers stay below 10 MiB; the limit bounds what parsing may cost."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48

FORMATS: dict[str, TensorFormat] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Every dtype of the format whose elements are whole bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of any type, as it lies in the file."""

    name: str
    dtype: str
    """One of `ELEMENT_BYTES`."""
    shape: tuple[int, ...]
    data: memoryview
    """Read-only; valid while the file is open."""


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """An opened file: all tensors as `stored`, by name, and those of plain floats as `tensors`; until `close`."""

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its header.

        Raises:
            LoadError: any defect; names the file and the field.
        """
        self.path = path
        self._mapped = MappedFile(path)
        try:
            infos, base = self._read_header()
            self._check_cover(infos, base)
        except LoadError:
            self.close()
            raise
        self.stored = {
            info.name: StoredTensor(info.name, info.dtype, info.shape, self.view[base + info.start : base + info.stop])
            for info in infos
        }
        self.tensors = plain_tensors(self.stored)

    @property
    def view(self) -> memoryview:
        """The whole file."""
        return self._mapped.view

    def close(self) -> None:
        """Unmaps the file; tensors are dead afterwards."""
        self._mapped.close()

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise LoadError(f"{self.path}: {field} {problem}", param=field)

    def _read_header(self) -> tuple[list[_Info], int]:
        """Every tensor's entry, and where the data starts."""
        view = self.view
        if len(view) < 8:
            self._fail("header", f"needs 8 bytes, but the file has {len(view)}; it is cut")
        length = int.from_bytes(view[:8], "little")
        if length > MAX_HEADER_BYTES:
            self._fail("header", f"claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
        if 8 + length > len(view):
            self._fail("header", f"claims {length} bytes, but the file has {len(view)}; it is cut")
        header = parse_json_object(bytes(view[8 : 8 + length]), f"{self.path}: header")
        header.pop("__metadata__", None)
        return [self._read_info(name, entry) for name, entry in header.items()], 8 + length

    def _read_info(self, name: str, entry: object) -> _Info:
        field = f"tensor {shown(name)}"
        if not isinstance(entry, dict):
            self._fail(field, f"is {shown(entry)}; an object is needed")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
            self._fail(field, f"has dtype {shown(dtype)}; known are {', '.join(ELEMENT_BYTES)}")
        if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(shape) > MAX_ELEMENTS:
            self._fail(field, f"has shape {shown(shape)}; a list of at most {MAX_DIMENSIONS} sizes is needed")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._fail(field, f"has data_offsets {shown(offsets)}; [start, end] is needed")
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        if offsets[1] - offsets[0] != size:
            self._fail(field, f"spans {offsets[1] - offsets[0]} bytes, but {dtype} of shape {shape} has {size}")
        return _Info(name, dtype, tuple(shape), offsets[0], offsets[1])

    def _check_cover(self, infos: list[_Info], base: int) -> None:
        """Tensors must lie one after another, from the first byte of the data to the file's last."""
        end, before = 0, "the header"
        for info in sorted(infos, key=lambda i: (i.start, i.stop)):
            field = f"tensor {shown(info.name)}"
            if info.start < end:
                self._fail(field, f"starts at {info.start} and overlaps {before}, which ends at {end}")
            if info.start > end:
                self._fail(field, f"starts at {info.start}, leaving a hole after {before}, which ends at {end}")
            end, before = info.stop, field
        available = len(self.view) - base
        if end > available:
            self._fail(before, f"ends at byte {end} of the data, which has {available}; the file is cut or lying")
        if end < available:
            self._fail("data", f"has {available} bytes, but the tensors fill {end}")


def plain_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, RawTensor]:
    """Those of them that hold plain floats."""
    return {
        name: RawTensor(name, FORMATS[tensor.dtype], tensor.shape, tensor.data)
        for name, tensor in stored.items()
        if tensor.dtype in FORMATS
    }


def other_dtypes(stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The types of those that hold something else."""
    return {name: tensor.dtype for name, tensor in stored.items() if tensor.dtype not in FORMATS}


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
