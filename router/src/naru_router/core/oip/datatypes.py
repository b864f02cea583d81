"""Datatypes of the Open Inference Protocol: their sizes, and their elements as Python values and as bytes.

Bytes are row-major and little-endian; each element of BYTES begins with its length, 4 bytes.
"""

from __future__ import annotations

import array
import itertools
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, cast

from naru_proto.errors import InternalError, InvalidRequest
from naru_router.core.fields import check_text, shown

BYTES = "BYTES"
SIZES: dict[str, int] = {
    "BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "BF16": 2,
    "INT32": 4, "UINT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8, "FP64": 8,
}  # fmt: skip
"""Bytes of one element."""
NAMES = (*SIZES, BYTES)
_CODES = {
    "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I", "INT64": "q", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
"""Of module array."""
_FLOATS = ("FP16", "FP32", "FP64")
_LENGTH = struct.Struct("<I")


def check_datatype(path: str, value: object) -> str:
    """The value as a datatype.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, str) or value not in NAMES:
        raise InvalidRequest(f"{path} is {shown(value)}; it must be one of {', '.join(NAMES)}", param=path)
    return value


def pack_elements(path: str, datatype: str, elements: Sequence[object], *, is_finite: bool = True) -> bytes:
    """The bytes of elements that came as JSON, or in a message.

    `is_finite`: a number that is too large for the datatype is refused; else it may be infinite.

    Raises:
        InvalidRequest: an element is not of the datatype, or BF16, which JSON does not carry.
    """
    if datatype == BYTES:
        return pack_bytes([check_text(path, element).encode() for element in elements])
    if datatype == "BF16":
        raise InvalidRequest(f"{path} is of BF16, which JSON does not carry; send binary data", param=path)
    if datatype == "BOOL":
        _check_kinds(path, elements, {bool}, "true or false")
        return bytes(cast(Any, elements))
    wanted = f"of {datatype}: " + ("numbers" if datatype in _FLOATS else "whole numbers in its range")
    _check_kinds(path, elements, {int, float} if datatype in _FLOATS else {int}, wanted)
    try:
        packed = _pack_numbers(datatype, elements, is_finite)
    except (OverflowError, struct.error) as exc:
        raise InvalidRequest(f"{path} holds a number outside of {datatype}: {exc}", param=path) from exc
    return packed


def _pack_numbers(datatype: str, elements: Sequence[object], is_finite: bool) -> bytes:
    if datatype == "FP16":
        return struct.pack(f"<{len(elements)}e", *elements)
    numbers: array.array[Any] = array.array(_CODES[datatype], cast(Any, elements))
    if is_finite and datatype == "FP32" and not all(map(math.isfinite, numbers)):
        raise OverflowError("JSON holds finite numbers alone, and one of them is too large")
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _check_kinds(path: str, elements: Sequence[object], kinds: set[type], wanted: str) -> None:
    if not set(map(type, elements)) <= kinds:
        wrong = next(element for element in elements if type(element) not in kinds)
        raise InvalidRequest(f"{path} holds {shown(wrong)}; its elements must be {wanted}", param=path)


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """The bytes of elements of BYTES."""
    lengths = (_LENGTH.pack(len(element)) for element in elements)
    return b"".join(itertools.chain.from_iterable(zip(lengths, elements, strict=True)))


def split_bytes(path: str, data: bytes) -> list[bytes]:
    """The elements of BYTES.

    Raises:
        InvalidRequest: a length leads beyond the data.
    """
    elements: list[bytes] = []
    at = 0
    while at < len(data):
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, at)[0] if begin <= len(data) else len(data) + 1
        if end > len(data):
            message = f"{path} of BYTES: the length of element {len(elements)} leads beyond its {len(data)} bytes"
            raise InvalidRequest(message, param=path)
        elements.append(data[begin:end])
        at = end
    return elements


def check_data(path: str, datatype: str, num_elements: int, data: bytes) -> None:
    """Checks bytes that came as they are.

    Raises:
        InvalidRequest: they are not so many elements of the datatype.
    """
    if datatype == BYTES:
        count = len(split_bytes(path, data))
        if count != num_elements:
            message = f"{path} holds {count} elements of BYTES, and its shape says {num_elements}"
            raise InvalidRequest(message, param=path)
    elif len(data) != num_elements * SIZES[datatype]:
        message = f"{path} has {len(data)} bytes; {num_elements} elements of {datatype} are "
        raise InvalidRequest(f"{message}{num_elements * SIZES[datatype]}", param=path)
    elif datatype == "BOOL" and data.strip(b"\0\1"):
        raise InvalidRequest(f"{path} of BOOL holds a byte that is neither 0 nor 1", param=path)


def unpack_elements(path: str, datatype: str, data: bytes) -> list[object]:
    """The elements as Python has them; numbers may be infinite or none.

    Raises:
        InvalidRequest: elements of BYTES are no UTF-8.
        InternalError: no such datatype.
    """
    if datatype == BYTES:
        try:
            return [element.decode() for element in split_bytes(path, data)]
        except UnicodeDecodeError as exc:
            message = f"{path} holds bytes that are no UTF-8, which JSON does not carry; ask for binary data"
            raise InvalidRequest(message, param=path) from exc
    if datatype == "BOOL":
        return [bool(element) for element in data]
    if datatype not in SIZES:
        raise InternalError(f"{path} is of {datatype!r}, which is no datatype of the protocol")
    if datatype == "BF16":
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
        datatype = "FP32"
    if datatype == "FP16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    return cast(list[object], unpack_numbers(datatype, data).tolist())


def unpack_numbers(datatype: str, data: bytes) -> array.array[int] | array.array[float]:
    """The numbers of a datatype that module array knows: all but FP16, BF16, BOOL and BYTES."""
    numbers: array.array[float] = array.array(_CODES[datatype], data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
