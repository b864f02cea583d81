"""The body of one request as it comes, for requests whose body is too large to be held. Made by the connection.

The connection puts pieces in, the endpoint takes them out; while more than a little waits, the socket is not read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from naru_proto.errors import Cancelled, InvalidRequest

HIGH_BYTES = 256 * 1024
"""More than this waiting: the socket rests until less than half of it does."""
READ_TIMEOUT_S = 60.0
"""Between two pieces."""


class BodyStream:
    """Mutable."""

    def __init__(self, on_first_read: Callable[[], None], on_flow: Callable[[], None]) -> None:
        """`on_first_read`: somebody wants the body; `on_flow`: `is_full` has changed."""
        self._on_first_read: Callable[[], None] | None = on_first_read
        self._on_flow = on_flow
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self._is_lost = False
        self.is_complete = False
        """All of it has come."""
        self.is_full = False
        """More is not wanted now."""

    def feed(self, piece: bytes) -> None:
        """Takes a piece from the socket."""
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._arrived.set()
        if not self.is_full and self._num_bytes > HIGH_BYTES:
            self.is_full = True
            self._on_flow()

    def end(self) -> None:
        """The last piece has come."""
        self.is_complete = True
        self._arrived.set()

    def lose(self) -> None:
        """The client has left."""
        self._is_lost = not self.is_complete
        self._arrived.set()

    async def read(self) -> bytes:
        """The next pieces, joined; empty: that was all.

        Raises:
            InvalidRequest: the client has stopped sending.
            Cancelled: it has left.
        """
        if self._on_first_read is not None:
            self._on_first_read()
            self._on_first_read = None
        while not self._pieces:
            if self.is_complete:
                return b""
            if self._is_lost:
                raise Cancelled("the client left in the middle of its body")
            self._arrived.clear()
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await self._arrived.wait()
            except TimeoutError as exc:
                raise InvalidRequest(f"nothing of the body has come for {READ_TIMEOUT_S:g} s; send it again") from exc
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        if self.is_full:
            self.is_full = False
            self._on_flow()
        return data
