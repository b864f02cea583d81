"""What clients have been sent and have not taken, over all connections: bounded in bytes and in time.

A connection joins when its socket takes no more, and leaves when it does again. Where all of them together hold too
much, the one that holds most is ended; so is one that has taken nothing for too long. Used by connections and server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class SlowReader(Protocol):
    """A connection whose client does not keep up."""

    def unsent_bytes(self) -> int:
        """What waits for the socket."""

    def abort(self) -> None:
        """Drops the connection and what waits."""


class _Mark:
    __slots__ = ("num_bytes", "since_s", "taken_bytes", "written_bytes")

    def __init__(self, num_bytes: int, now_s: float) -> None:
        self.num_bytes = num_bytes
        self.written_bytes = num_bytes
        self.taken_bytes = 0
        self.since_s = now_s
        """When the client last took something."""


class Backlog:
    """All slow readers of one server. Mutable."""

    def __init__(
        self,
        max_bytes: int,
        timeout_s: float,
        clock: Callable[[], float],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end`: called for each reader that is ended."""
        self._on_end = on_end
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._clock = clock
        self._marks: dict[SlowReader, _Mark] = {}
        self.num_bytes = 0
        """Unsent, all together."""
        self.num_ended = 0
        """Connections that were ended for it, since the start."""

    def join(self, reader: SlowReader) -> None:
        """From now on its bytes count."""
        if reader not in self._marks:
            mark = self._marks[reader] = _Mark(reader.unsent_bytes(), self._clock())
            self.num_bytes += mark.num_bytes
            self._shrink()

    def leave(self, reader: SlowReader) -> None:
        """Its bytes count no more; one that never joined is no fault."""
        mark = self._marks.pop(reader, None)
        if mark is not None:
            self.num_bytes -= mark.num_bytes

    def wrote(self, reader: SlowReader, num_bytes: int) -> None:
        """A reader that has joined was sent more."""
        mark = self._marks.get(reader)
        if mark is not None:
            mark.written_bytes += num_bytes
            self._look(reader, mark)
            self._shrink()

    def sweep(self) -> None:
        """Ends the readers that have taken nothing for too long. Called about every second."""
        now_s = self._clock()
        for reader, mark in list(self._marks.items()):
            self._look(reader, mark)
            taken_bytes = mark.written_bytes - mark.num_bytes
            if taken_bytes > mark.taken_bytes:
                mark.taken_bytes, mark.since_s = taken_bytes, now_s
            elif now_s - mark.since_s > self._timeout_s:
                self._drop(reader, f"it has taken nothing for {self._timeout_s:g} s")

    def _look(self, reader: SlowReader, mark: _Mark) -> None:
        num_bytes = reader.unsent_bytes()
        self.num_bytes += num_bytes - mark.num_bytes
        mark.num_bytes = num_bytes

    def _shrink(self) -> None:
        while self.num_bytes > self._max_bytes and self._marks:
            worst = max(self._marks, key=lambda reader: self._marks[reader].num_bytes)
            self._drop(worst, f"all clients together have more than {self._max_bytes} bytes to take, and it has most")

    def _drop(self, reader: SlowReader, reason: str) -> None:
        logger.info("a client is disconnected: %s", reason)
        self.leave(reader)
        self.num_ended += 1
        self._on_end()
        reader.abort()
