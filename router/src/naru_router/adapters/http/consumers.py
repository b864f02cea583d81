"""What takes the output of jobs for HTTP: one writes events as they come, one collects the whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from naru_proto.v1.worker_pb2 import Delta
from naru_router.adapters.http.responses import EventStream
from naru_router.core.answers import Answer
from naru_router.core.routing import Decision


class ChunkWriter(Protocol):
    """Makes events of deltas; see core.chunks_chat and core.chunks_completion."""

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none."""


_W = TypeVar("_W", bound=ChunkWriter)


class StreamConsumer(Generic[_W]):
    """Sends each batch of deltas as one write."""

    def __init__(self, stream: EventStream, make_writer: Callable[[], _W], on_first_byte: Callable[[], None]) -> None:
        self._stream = stream
        self._make_writer = make_writer
        self._on_first_byte = on_first_byte
        self.writer = make_writer()
        self.has_sent = False

    def begin(self, decision: Decision) -> None:
        """Starts over; only ever called before anything was sent."""
        self.writer = self._make_writer()
        if not self._stream.has_started:
            self._stream.headers = [h for h in self._stream.headers if h[0] != ROUTE_HEADER] + [route_header(decision)]

    async def feed(self, deltas: Sequence[Delta]) -> None:
        """Sends the deltas' events."""
        data = self.writer.feed(deltas)
        if data:
            if not self._stream.has_started:
                self._on_first_byte()
            self.has_sent = True
            await self._stream.write(data)


class AnswerConsumer:
    """Collects; a client that waits for the whole answer has seen nothing of it."""

    has_sent = False

    def __init__(self, n: int) -> None:
        self._n = n
        self.answer = Answer(n)
        self.decision: Decision | None = None

    def begin(self, decision: Decision) -> None:
        """Starts over."""
        self.answer = Answer(self._n)
        self.decision = decision

    async def feed(self, deltas: Sequence[Delta]) -> None:
        """Adds the deltas."""
        self.answer.feed(deltas)


ROUTE_HEADER = b"x-naru-route"


def route_header(decision: Decision) -> tuple[bytes, bytes]:
    """Where the request went and why, for people."""
    text = f"{decision.worker_id}; {'; '.join(decision.reasons)}"
    return ROUTE_HEADER, "".join(c if " " <= c <= "~" else "?" for c in text).encode("ascii")


class Stopwatch:
    """Seconds since a request came."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def elapsed_s(self) -> float:
        """Until now."""
        return time.perf_counter() - self._start_s
