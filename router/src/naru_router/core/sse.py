"""Server-sent events byte by byte: framing, fast JSON strings, the last events of a stream.

Used by the chunk writers. Every event is ``data: {json}`` and one empty line, JSON on one line.
"""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"
EVENT_HEAD = b"data: "
EVENT_TAIL = b"\n\n"

# Legal in JSON and in SSE, but clients that split text with Unicode line ends would cut an event there.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def quote(text: str) -> bytes:
    """The text as a JSON string that holds no line end of any alphabet."""
    data = orjson.dumps(text)
    if not text.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def dump(value: object) -> bytes:
    """Any JSON value on one line, with the same care."""
    data = orjson.dumps(value)
    for raw, escaped in _LINE_ENDS:
        data = data.replace(raw, escaped)
    return data


def event(data: bytes) -> bytes:
    """One event around one line of JSON."""
    return EVENT_HEAD + data + EVENT_TAIL
