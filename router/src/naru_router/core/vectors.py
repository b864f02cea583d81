"""Vectors as workers send them, float32 in bytes: into JSON, and compared. No array library: routers start fast."""

from __future__ import annotations

import base64
import math
import operator
import sys
from array import array
from collections.abc import Iterator, Sequence

import orjson

FLOAT_BYTES = 4
PIECE_BYTES = 256 * 1024
"""Of a reply's JSON that is made, and sent, at once: other requests have their turn between two."""
_JSON_BYTES_PER_FLOAT = 21


def floats(values: bytes) -> array[float]:
    """The numbers of a vector."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def embedding_items(vectors: Sequence[bytes], *, is_base64: bool) -> Iterator[bytes]:
    """OpenAI's objects of the vectors, with commas between, in pieces of about PIECE_BYTES, none empty."""
    piece: list[bytes] = []
    num_bytes = 0
    for index, values in enumerate(vectors):
        if is_base64:
            number = b'"%b"' % base64.b64encode(values)
        else:
            number = orjson.dumps(floats(values).tolist())
        comma = b"," if index else b""
        piece.append(b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, number))
        num_bytes += len(number)
        if num_bytes >= PIECE_BYTES:
            yield b"".join(piece)
            piece, num_bytes = [], 0
    if piece:
        yield b"".join(piece)


def json_bytes(vectors: Sequence[bytes], *, is_base64: bool) -> int:
    """How long the JSON of vectors of one length will be, about."""
    values = len(vectors[0]) if vectors else 0
    return len(vectors) * (values * 4 // 3 if is_base64 else values // FLOAT_BYTES * _JSON_BYTES_PER_FLOAT)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Cosine of the angle between two vectors of one length; 0 where one of them is 0."""
    norms = math.sqrt(_dot(first, first) * _dot(second, second))
    return 0.0 if norms == 0.0 else max(-1.0, min(1.0, _dot(first, second) / norms))


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return float(sum(map(operator.mul, first, second)))
