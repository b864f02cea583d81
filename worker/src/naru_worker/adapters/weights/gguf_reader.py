"""A cursor over a GGUF header that never passes the end of the file.

Used by `gguf_file`. Knows the value encodings, not the keys. Every length is checked against what is left before it is
used.
"""

from __future__ import annotations

import struct
from typing import NoReturn

from naru_proto.errors import LoadError
from naru_worker.core.fields import shown

MAX_ARRAY_ELEMENTS = 2**24
"""Over all arrays of a file: four vocabularies of the largest size allowed."""
MAX_ARRAY_DEPTH = 3

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufReader:
    """A cursor over the header that never passes the end of the file."""

    def __init__(self, file: str, view: memoryview) -> None:
        self.file = file
        self.view = view
        self.position = 0
        self._num_elements = 0

    def fail(self, field: str, problem: str) -> NoReturn:
        """Raises LoadError naming file and field."""
        raise LoadError(f"{self.file}: {field} {problem}", param=field)

    def need(self, size: int, field: str) -> int:
        """Moves on by `size` bytes; returns where they start."""
        start = self.position
        left = len(self.view) - start
        if size > left:
            self.fail(field, f"needs {size} bytes at offset {start}, but {left} are left; the file is cut or lying")
        self.position = start + size
        return start

    def u32(self, field: str) -> int:
        """An unsigned 32-bit number."""
        return int(_U32.unpack_from(self.view, self.need(4, field))[0])

    def u64(self, field: str) -> int:
        """An unsigned 64-bit number."""
        return int(_U64.unpack_from(self.view, self.need(8, field))[0])

    def string(self, field: str, limit: int | None = None) -> str:
        """A length-prefixed string."""
        length = self.u64(field)
        if limit is not None and length > limit:
            self.fail(field, f"has {length} bytes; at most {limit} are allowed")
        start = self.need(length, field)
        return self._text(bytes(self.view[start : start + length]), field)

    def _text(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(field, f"is {shown(raw)}; it must be UTF-8")

    def value(self, kind: int, field: str, depth: int = 0) -> object:
        """A value of any type; `kind` is its type number."""
        if kind in _SCALARS:
            layout = struct.Struct("<" + _SCALARS[kind])
            return layout.unpack_from(self.view, self.need(layout.size, field))[0]
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self._array(field, depth + 1)
        self.fail(field, f"has value type {kind}; types 0 to 12 exist")

    def _array(self, field: str, depth: int) -> list[object]:
        """A list; nested ones up to MAX_ARRAY_DEPTH."""
        if depth > MAX_ARRAY_DEPTH:
            self.fail(field, f"nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self.u32(field)
        length = self.u64(field)
        self._num_elements += length
        if self._num_elements > MAX_ARRAY_ELEMENTS:
            self.fail(field, f"has {length} elements; a file's arrays may hold {MAX_ARRAY_ELEMENTS} in all")
        if kind in _SCALARS:
            layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
            return list(layout.unpack_from(self.view, self.need(layout.size, field)))
        if kind == _STRING:
            return list(self._strings(length, field))
        return [self.value(kind, field, depth) for _ in range(length)]

    def _strings(self, length: int, field: str) -> list[str]:
        """The vocabulary's hot loop: two per file of up to hundreds of thousands of short strings."""
        view, position, end = self.view, self.position, len(self.view)
        unpack = _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(length):
                start = position + 8
                position = start + unpack(view, position)[0]
                if position > end:
                    self.fail(field, f"has a string that ends at {position}, past the file's {end} bytes")
                out.append(str(view[start:position], "utf-8"))
        except struct.error:
            self.fail(field, f"needs {length} strings, but the file ends after {len(out)}")
        except UnicodeDecodeError:
            self.fail(field, f"has a string number {len(out)} that is not UTF-8")
        self.position = position
        return out
