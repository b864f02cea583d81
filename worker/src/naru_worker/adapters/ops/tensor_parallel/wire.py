"""What rank 0 tells the others: frames of a JSON header and packed arrays, over a socket of the machine itself."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

import numpy as np

from naru_worker.adapters.ops.protocol import BatchInputs

_LENGTHS = struct.Struct("<II")
MAX_HEADER_BYTES = 1 << 20
_ARRAYS = ("token_ids", "positions", "slots", "query_start", "seq_lens", "block_table", "logits_rows", "copies")


class Frame(NamedTuple):
    """One message."""

    header: dict[str, Any]
    tail: bytes = b""


def send(connection: socket.socket, frame: Frame) -> None:
    """Sends a frame whole.

    Raises:
        OSError: the other side is gone, or takes nothing any more.
    """
    header = json.dumps(frame.header).encode()
    connection.sendall(b"".join((_LENGTHS.pack(len(header), len(frame.tail)), header, frame.tail)))


def receive(connection: socket.socket) -> Frame | None:
    """The next frame; None: the other side is gone.

    Raises:
        OSError: the connection broke, or timed out.
    """
    lengths = _exactly(connection, _LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, tail_bytes = _LENGTHS.unpack(lengths)
    if header_bytes > MAX_HEADER_BYTES:
        raise OSError(f"a header of {header_bytes} bytes; the other side does not speak this protocol")
    header, tail = _exactly(connection, header_bytes), _exactly(connection, tail_bytes)
    return None if header is None or tail is None else Frame(json.loads(header), tail)


def pack_batch(batch: BatchInputs) -> bytes:
    """A step's inputs in one piece of memory: lengths first, then all arrays. What changed in tables is not said."""
    arrays = [getattr(batch, name) for name in _ARRAYS]
    sizes = [array.size for array in arrays]
    head = np.array([batch.num_generated_tokens, batch.block_table.shape[1], *sizes], np.int32)
    return np.concatenate([head, *(array.reshape(-1) for array in arrays)]).astype("<i4", copy=False).tobytes()


def unpack_batch(packed: bytes) -> BatchInputs:
    """The inputs again; their arrays are read-only views."""
    words = np.frombuffer(packed, "<i4")
    num_generated, width = int(words[0]), int(words[1])
    sizes = words[2 : 2 + len(_ARRAYS)]
    pieces = np.split(words[2 + len(_ARRAYS) :], np.cumsum(sizes)[:-1])
    arrays = dict(zip(_ARRAYS, pieces, strict=True))
    arrays["block_table"] = arrays["block_table"].reshape(len(arrays["seq_lens"]), width)
    arrays["copies"] = arrays["copies"].reshape(-1, 2)
    return BatchInputs(**arrays, num_generated_tokens=num_generated)  # type: ignore[arg-type]


def _exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        part = connection.recv(min(num_bytes, 1 << 20))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
