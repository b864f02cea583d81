"""Which other files an ONNX file refers to: the external data of its tensors. Checked before the library opens any.

Walks the protocol-buffer fields that can hold tensors and skips all else, weights included, so that it costs a
millisecond and no memory. Source of the field numbers: onnx/onnx.proto of the ONNX project.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from naru_proto.errors import LoadError

MAX_DEPTH = 64
"""Of graphs within graphs."""
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _SPARSE, _TENSOR, _FUNCTION, _ENTRY = range(8)
_CHILDREN: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _TENSOR: {13: _ENTRY},
    _ENTRY: {},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Broken(Exception):
    """The file is no such message."""


def external_files(path: Path) -> list[Path]:
    """Files beside `path` that hold its weights, each inside its folder.

    Raises:
        LoadError: the file is damaged, or refers to a file outside its folder or to none.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            view = memoryview(data)
            try:
                locations = sorted(set(_locations(view, _MODEL, 0)))
            finally:
                view.release()
    except (_Broken, UnicodeDecodeError) as exc:
        raise LoadError(f"{path}: is no ONNX file, or damaged ({exc}); fetch it again") from None
    except ValueError as exc:
        raise LoadError(f"{path}: is empty") from exc
    except OSError as exc:
        raise LoadError(f"{path}: cannot be read ({exc.strerror})") from exc
    return [_inside(path, location) for location in locations]


def _inside(path: Path, location: str) -> Path:
    folder = path.parent.resolve()
    try:
        file = (folder / location).resolve(strict=True)
        is_served = file.is_relative_to(folder) and file.is_file() and not Path(location).is_absolute()
    except (OSError, ValueError, RuntimeError):
        raise LoadError(f"{path}: its weights are in {location[:200]!r}, which is not there; fetch it again") from None
    if not is_served:
        raise LoadError(f"{path}: its weights are in {location[:200]!r}, outside its folder; that is never read")
    return file


def _locations(view: memoryview, kind: int, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise _Broken(f"it nests deeper than {MAX_DEPTH}")
    if kind == _ENTRY:
        entry = {number: bytes(part).decode() for number, part in _parts(view) if number in (1, 2)}
        if entry.get(1) == "location":
            yield entry.get(2, "")
        return
    children = _CHILDREN[kind]
    for number, part in _parts(view):
        if number in children:
            yield from _locations(part, children[number], depth + 1)


def _parts(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each field that has a length."""
    place, end = 0, len(view)
    while place < end:
        tag, place = _varint(view, place)
        number, wire = tag >> 3, tag & 7
        if wire == _BYTES:
            length, place = _varint(view, place)
            if place + length > end:
                raise _Broken("a part reaches beyond the end")
            with view[place : place + length] as part:
                yield number, part
            place += length
        elif wire == _VARINT:
            _, place = _varint(view, place)
        elif wire in (_FIXED64, _FIXED32):
            place += 8 if wire == _FIXED64 else 4
        else:
            raise _Broken(f"a field has wire type {wire}")
    if place != end:
        raise _Broken("a part reaches beyond the end")


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(view) and shift < 70:
        byte = view[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
    raise _Broken("a number has no end")
