"""What takes the output of jobs for HTTP: one writes events as they come, one collects the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from naru_proto.names import HEADER_MODEL, HEADER_ROUTE
from naru_proto.v1.worker_pb2 import Delta
from naru_router.adapters.http.messages import Headers
from naru_router.adapters.http.responses import EventStream
from naru_router.core.answers import Answer
from naru_router.core.routing.model import Decision


class ChunkWriter(Protocol):
    """Makes events of deltas; see core.chunks_chat and core.chunks_completion."""

    def feed(self, deltas: Sequence[Delta]) -> bytes:
        """The events of the deltas, possibly none."""


_W = TypeVar("_W", bound=ChunkWriter)


class StreamConsumer(Generic[_W]):
    """Sends each batch of deltas as one write, in the turn of the event loop that brings it."""

    def __init__(
        self,
        stream: EventStream,
        make_writer: Callable[[], _W],
        on_first_byte: Callable[[], None],
        *,
        is_explained: bool = False,
        is_first: bool = True,
    ) -> None:
        """Of one prompt.

        Args:
            stream: where to.
            make_writer: makes what turns deltas into events.
            on_first_byte: called before the first event.
            is_explained: the reply says where the request went.
            is_first: of the prompts of the call: the one that the reply's head tells of.
        """
        self._stream = stream
        self._make_writer = make_writer
        self._on_first_byte = on_first_byte
        self._is_explained = is_explained
        self._is_first = is_first
        self.writer = make_writer()
        self._feed = self.writer.feed
        self.has_sent = False

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over; only ever called before anything was sent."""
        self.writer = self._make_writer()
        self._feed = self.writer.feed
        if self._is_first and not self._stream.has_started:
            self._stream.headers[:] = answer_headers(decision, answers_as, is_explained=self._is_explained)

    def feed(self, deltas: Sequence[Delta]) -> None:
        """Sends the deltas' events."""
        data = self._feed(deltas)
        if data:
            if not self.has_sent:
                self.has_sent = True
                self._on_first_byte()
            self._stream.write(data)


class AnswerConsumer:
    """Collects; a client that waits for the whole answer has seen nothing of it."""

    has_sent = False

    def __init__(self, n: int) -> None:
        self._n = n
        self.answer = Answer(n)
        self.decision: Decision | None = None
        self.answers_as = ""

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over."""
        self.answer = Answer(self._n)
        self.decision, self.answers_as = decision, answers_as

    def feed(self, deltas: Sequence[Delta]) -> None:
        """Adds the deltas."""
        self.answer.feed(deltas)


_ROUTE_HEADER = HEADER_ROUTE.encode("ascii")
_MODEL_HEADER = HEADER_MODEL.encode("ascii")


def answer_headers(decision: Decision, answers_as: str, *, is_explained: bool) -> Headers:
    """Which model answers, where it is another one, and where the request went and why, where that was asked."""
    headers: Headers = ((_MODEL_HEADER, answers_as.encode("ascii", "replace")),) if answers_as else ()
    if not is_explained:
        return headers
    text = f"{decision.worker_id}; {'; '.join(decision.reasons)}"
    shown = "".join(c if " " <= c <= "~" else "?" for c in text).encode("ascii")
    return (*headers, (_ROUTE_HEADER, shown))
