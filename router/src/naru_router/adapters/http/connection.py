"""One client's connection: HTTP/1.1 in, by httptools' parser, one task for each request, replies out in their order.

Opened by the server. A request is handed on when its whole body has come, or before it where its path takes a stream;
the next one of the same connection waits until the reply is complete. When the client leaves, the task of its request
is cancelled. Knows no paths and no models.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, cast

import httptools

from naru_router.adapters.http.body_stream import BodyStream
from naru_router.adapters.http.messages import HttpRequest, Reply

if TYPE_CHECKING:
    from naru_router.adapters.http.server import HttpServer

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_WAITING = 16
"""Requests sent ahead on one connection; more are not read before some are answered."""
IDLE_TIMEOUT_S = 75.0
READ_TIMEOUT_S = 60.0
"""For the head of a request, and between pieces of its body."""
LINGER_S = 1.0
"""Before a connection with unread bytes is closed: the client would lose the reply with it."""

_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    """See the module. The methods named `on_...` are called by the parser."""

    def __init__(self, server: HttpServer) -> None:
        self.deadline_s = math.inf
        """When the server closes it, on the loop's clock."""
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._is_open = False
        self._is_refusing = False
        """What still comes is not looked at."""
        self._is_slow = False
        self._task: asyncio.Task[None] | None = None
        self._reply: Reply | None = None
        self._waiting: deque[tuple[HttpRequest, Reply]] = deque()
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._request: HttpRequest | None = None
        """Whose body is being read."""
        self._stream: BodyStream | None = None
        """Where that goes, of a request that was handed on without it."""
        self._has_taken = asyncio.Event()
        self._has_taken.set()
        """The socket takes more, or nobody is there any more."""

    @property
    def is_idle(self) -> bool:
        """No request is being answered."""
        return self._reply is None

    @property
    def transport(self) -> asyncio.Transport:
        """The socket's."""
        return self._transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client has come."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclasses
        self._is_open = True
        self._server.take(self)
        self.deadline_s = self._server.loop.time() + IDLE_TIMEOUT_S

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        if self._is_refusing:
            return
        if self._request is None and self._stream is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request itself is answered as any other; a client that goes on in another protocol has to come again.
            self._is_refusing = True
            last = self._waiting[-1][1] if self._waiting else self._reply
            if last is not None:
                last.close_after()
        except httptools.HttpParserError:
            self._refuse(_BAD_REQUEST)
            return
        if self._request is None and self._stream is None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)
        elif self._reply is None:
            self.deadline_s = self._server.loop.time() + READ_TIMEOUT_S

    def eof_received(self) -> bool:
        """The client sends no more: nobody half closes who waits for a long answer, so it has left."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._is_open = False
        self._server.connections.discard(self)
        self._server.backlog.leave(self)
        self._waiting.clear()
        self._has_taken.set()
        if self._stream is not None:
            self._stream.lose()
        if self._task is not None and self._reply is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The socket takes no more."""
        self._is_slow = True
        self._has_taken.clear()
        self._server.backlog.join(self)

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._is_slow = False
        self._has_taken.set()
        self._server.backlog.leave(self)

    def unsent_bytes(self) -> int:
        """What waits for the socket."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Drops the connection."""
        self._transport.abort()

    def close(self) -> None:
        """Closes it once all that was written is sent."""
        self._transport.close()

    def on_url(self, url: bytes) -> None:
        """A piece of the target: the first of a head."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete."""
        request = HttpRequest(self._parser.get_method(), self._target, self._headers)
        self._request = request
        self._target, self._headers, self._head_bytes = b"", [], 0
        if self._server.is_streamed(request.method, request.target):
            self._accept_stream(request)
            return
        declared = request.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._server.max_body_bytes:
            self._cut_body()
        elif request.header(b"expect") == b"100-continue" and self._reply is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._stream is not None:
            self._stream.feed(body)
            return
        if self._request is None:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._server.max_body_bytes:
            self._cut_body()
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._stream is not None:
            self._stream.end()
            self._stream = None
            return
        request = self._request
        if request is None:
            return  # its body was cut: it is being answered
        request.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._accept(request, keeps_open=self._parser.should_keep_alive())

    def write(self, data: bytes) -> None:
        """Queues bytes for the client."""
        if self._is_open:
            self._transport.write(data)
            if self._is_slow:
                self._server.backlog.wrote(self, len(data))

    def reply_head(self) -> bytes:
        """Header lines that every reply has."""
        return self._server.date_line

    async def drained(self) -> None:
        """Returns when the socket takes more, or the client has left."""
        await self._has_taken.wait()

    def reply_ended(self, *, keeps_open: bool) -> None:
        """Goes on with the next request."""
        self._reply = self._task = None
        if not self._is_open:
            return
        if self._stream is not None and not self._waiting:
            self._is_refusing, keeps_open = True, False  # answered before its body was read: the rest is not wanted
            self._stream = None
            self._set_flow()
        if not keeps_open:
            self._part()
        elif self._waiting:
            self._start(*self._waiting.popleft())
            self._set_flow()
        else:
            self.deadline_s = self._server.loop.time() + IDLE_TIMEOUT_S

    def _accept(self, request: HttpRequest, *, keeps_open: bool) -> None:
        self._request, self._pieces, self._body_bytes = None, [], 0
        reply = Reply(
            self,
            is_head=request.method == b"HEAD",
            is_http_10=self._parser.get_http_version() == "1.0",
            keeps_open=keeps_open and not self._server.is_leaving(),
        )
        if self._reply is None:
            self._start(request, reply)
            return
        self._waiting.append((request, reply))
        self._set_flow()

    def _accept_stream(self, request: HttpRequest) -> None:
        """Hands a request on whose body has not come."""

        def ask() -> None:
            if request.header(b"expect") == b"100-continue":
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

        request.stream = stream = BodyStream(ask, self._set_flow)
        self._accept(request, keeps_open=self._parser.should_keep_alive())
        self._stream = stream

    def _set_flow(self) -> None:
        """Reads the socket, or lets it rest: too much waits, of requests or of a body."""
        if not self._is_open or self._transport.is_closing():
            return
        is_full = self._stream is not None and self._stream.is_full
        if is_full or len(self._waiting) >= MAX_WAITING:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _start(self, request: HttpRequest, reply: Reply) -> None:
        self._reply = reply
        self.deadline_s = math.inf
        self._task = self._server.loop.create_task(self._run(self._server.handle(request, reply), reply))

    async def _run(self, work: Coroutine[None, None, None], reply: Reply) -> None:
        try:
            await work
        except Exception:
            # The top of a request: nobody above could do better, and the client must not wait for ever.
            logger.exception("a request failed without a reply")
        finally:
            if not reply.is_over:
                self.abort()

    def _cut_body(self) -> None:
        """Answers a request whose body is too large without reading on."""
        request = self._request
        assert request is not None  # called while its body is read
        request.is_body_too_large = True
        self._is_refusing = True
        self._accept(request, keeps_open=False)

    def _refuse(self, reply: bytes) -> None:
        self._is_refusing = True
        if self._reply is None:
            self.write(reply)
            self._part()
        else:
            self.close()  # behind an answer that is not complete nothing can be said

    def _part(self) -> None:
        """Closes; where bytes may still come, only after the client has had time to read the reply."""
        if not self._is_refusing:
            self.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline_s = self._server.loop.time() + LINGER_S
