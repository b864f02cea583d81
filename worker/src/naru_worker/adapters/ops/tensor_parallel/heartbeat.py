"""How rank 0 finds out who holds up an exchange: a thread in each rank tells how many it has begun.

Who hangs has begun fewer than those who wait for it, or does not answer at all.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

_COUNT = struct.Struct("<Q")


def answer_pulses(connection: socket.socket, num_begun: Callable[[], int], on_end: Callable[[], None]) -> None:
    """Starts the thread; it calls `on_end` and ends when the other side is gone. `num_begun`: exchanges so far."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while connection.recv(1):
                connection.sendall(_COUNT.pack(num_begun()))
        on_end()

    threading.Thread(target=answer, name="pulse", daemon=True).start()


def ask(connection: socket.socket, patience_s: float) -> int | None:
    """How many exchanges the other side has begun; None: no answer."""
    deadline_s = time.monotonic() + patience_s
    answer = b""
    try:
        connection.send(b"?")
        while len(answer) < _COUNT.size:
            if not select.select([connection], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                return None
            piece = connection.recv(_COUNT.size - len(answer))
            if not piece:
                return None
            answer += piece
    except OSError:
        return None
    count: int = _COUNT.unpack(answer)[0]
    return count
