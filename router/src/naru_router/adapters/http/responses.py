"""Replies as ASGI messages: JSON, OpenAI errors, and streams of server-sent events. Used by all HTTP endpoints."""

from __future__ import annotations

from starlette.types import Send

from naru_proto.errors import NaruError
from naru_router.core.errors import error_body, error_shape
from naru_router.core.sse import event

Headers = list[tuple[bytes, bytes]]

_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


async def send_json(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Sends a whole JSON reply."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *(headers or []),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: NaruError, *, is_body_unread: bool = False) -> int:
    """Sends an error in OpenAI's form; its status."""
    shape = error_shape(error)
    headers: Headers = []
    if shape.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % shape.retry_after_s))
    if is_body_unread:
        # What is left of the body must not be taken for the next request.
        headers.append((b"connection", b"close"))
    await send_json(send, shape.status, error_body(error), headers)
    return shape.status


class EventStream:
    """A streamed reply. The status line goes out with the first event, so that an error before it is a plain reply."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: Headers = list(_SSE_HEADERS)
        """May be added to until the first write."""
        self.has_started = False

    async def write(self, data: bytes) -> None:
        """Sends whole events in one write; waits while the client reads slower than the model writes."""
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self.headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """Ends the reply."""
        await self._send({"type": "http.response.body", "body": b""})

    async def close_with_error(self, error: NaruError) -> None:
        """Ends a started reply with an error event; no end mark, which a client could take for success."""
        await self.write(event(error_body(error)))
        await self.close()
