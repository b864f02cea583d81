"""Replies of the generation endpoints: JSON, OpenAI errors, and streams of server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable

from naru_proto.errors import NaruError
from naru_router.adapters.http.messages import Headers, Reply
from naru_router.core.error_forms import OPENAI_ERRORS, ErrorForm
from naru_router.core.errors import error_shape

_JSON = (b"content-type", b"application/json")
_SSE_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
)


def send_json(reply: Reply, status: int, body: bytes, headers: Headers = ()) -> None:
    """Sends a whole JSON reply."""
    reply.send(status, (_JSON, *headers), body)


def send_error(reply: Reply, error: NaruError, headers: Headers = (), form: ErrorForm = OPENAI_ERRORS) -> int:
    """Sends an error; its status."""
    shape = error_shape(error)
    if shape.retry_after_s is not None:
        headers = (*headers, (b"retry-after", b"%d" % shape.retry_after_s))
    send_json(reply, shape.status, form.body(error), headers)
    return shape.status


class EventStream:
    """A streamed reply. The status line goes out with the first event, so that an error before it is a plain reply.

    Nothing here waits: a client that reads slower than the model writes is the connection's business.
    """

    __slots__ = ("_on_start", "_reply", "headers", "last_write_s")

    def __init__(self, reply: Reply, on_start: Callable[[], None]) -> None:
        """`on_start`: called before the head is sent, with the first event or comment."""
        self._reply = reply
        self._on_start = on_start
        self.headers: list[tuple[bytes, bytes]] = []
        """Beside those of any stream; may be added to until the first write."""
        self.last_write_s = time.monotonic()
        """When the client was last sent something, or the request came."""

    @property
    def has_started(self) -> bool:
        """Whether the client has seen a byte."""
        return self._reply.has_started

    def write(self, data: bytes) -> None:
        """Sends whole events, or a comment, in one write."""
        if not self._reply.has_started:
            self._on_start()
            self._reply.begin(200, (*_SSE_HEADERS, *self.headers))
        self._reply.write(data)
        self.last_write_s = time.monotonic()

    def close(self) -> None:
        """Ends the reply."""
        self._reply.end()

    def close_with_error(self, error: NaruError, form: ErrorForm = OPENAI_ERRORS) -> None:
        """Ends a started reply with an error event; no end mark, which a client could take for success."""
        self.write(form.event(error))
        self.close()
