"""Frames of HTTP/2: their types, and how they look as bytes. Used by `stream`.

Source: RFC 9113, https://www.rfc-editor.org/rfc/rfc9113
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW_BYTES = 2**31 - 1

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 2, 4, 5, 6
"""Names of settings."""

CANCEL = 8
"""Error code: the stream is not wanted any more."""
ERROR_NAMES: Mapping[int, str] = {
    0: "NO_ERROR",
    1: "PROTOCOL_ERROR",
    2: "INTERNAL_ERROR",
    3: "FLOW_CONTROL_ERROR",
    5: "STREAM_CLOSED",
    6: "FRAME_SIZE_ERROR",
    7: "REFUSED_STREAM",
    8: "CANCEL",
    11: "ENHANCE_YOUR_CALM",
}

_HEAD = struct.Struct("!HBBBI")
_SETTING = struct.Struct("!HI")
_WORD = struct.Struct("!I")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def read_head(data: bytes, at: int) -> tuple[int, int, int, int]:
    """(bytes of the payload, type, flags, stream) of the frame that begins at `at`."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return (high << 8) | low, kind, flags, stream & 0x7FFFFFFF


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """(name, value) in order. The payload's size is a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


def word(value: int) -> bytes:
    """32 bits: an error code, an increment."""
    return _WORD.pack(value)


def read_word(payload: bytes, at: int = 0) -> int:
    """32 bits."""
    value: int = _WORD.unpack_from(payload, at)[0]
    return value


def window_update(stream: int, increment: int) -> bytes:
    """Lets the peer send so many bytes more."""
    return frame(WINDOW_UPDATE, 0, stream, word(increment))


def error_name(code: int) -> str:
    """The name of an error code, or its number."""
    return ERROR_NAMES.get(code, str(code))
