"""Requests and replies of HTTP/1.1 as the endpoints see them. Made by connections."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol

from naru_router.adapters.http.body_stream import BodyStream

Headers = Sequence[tuple[bytes, bytes]]

STATUS_LINES = {
    **{status: b"HTTP/1.1 %d \r\n" % status for status in range(100, 600)},
    **{int(status): b"HTTP/1.1 %d %s\r\n" % (status, status.phrase.encode()) for status in HTTPStatus},
}


class HttpRequest:
    """One request, its body read, but for those whose body is a stream."""

    __slots__ = (
        "_by_name",
        "body",
        "headers",
        "is_body_too_large",
        "method",
        "params",
        "request_id",
        "stream",
        "target",
    )

    def __init__(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.method = method
        self.target = target
        """As it was sent, query included."""
        self.headers = headers
        """Names in lower case."""
        self.body = b""
        self.is_body_too_large = False
        """Nothing more of it was read: the connection ends with the reply."""
        self.stream: BodyStream | None = None
        """The body, where it is handed on as it comes."""
        self.request_id = ""
        self.params: dict[str, str] = {}
        """Of the path, by name, decoded."""
        self._by_name: dict[bytes, bytes] | None = None

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, the first one of a name in lower case."""
        if self._by_name is None:
            self._by_name = {}
            for key, value in self.headers:
                self._by_name.setdefault(key, value)
        return self._by_name.get(name)

    def text(self, name: str) -> str | None:
        """The same, as text."""
        value = self.header(name.encode("ascii"))
        return None if value is None else value.decode("latin-1")


class Wire(Protocol):
    """What a reply writes to: its connection."""

    def write(self, data: bytes) -> None:
        """Queues bytes for the client; never waits."""

    def reply_head(self) -> bytes:
        """Header lines that every reply has."""

    async def drained(self) -> None:
        """Returns when the client has taken most of what was written, or has left."""

    def reply_ended(self, *, keeps_open: bool) -> None:
        """The reply is complete."""


class Reply:
    """The answer to one request: sent whole, or begun, written and ended."""

    __slots__ = ("_is_chunked", "_is_head", "_keeps_open", "_wire", "extra", "has_started", "is_over")

    def __init__(self, wire: Wire, *, is_head: bool, is_http_10: bool, keeps_open: bool) -> None:
        self._wire = wire
        self._is_head = is_head
        self._is_chunked = not is_http_10
        self._keeps_open = keeps_open
        self.extra = b""
        """Header lines of this reply, whatever it will be."""
        self.has_started = False
        self.is_over = False

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole reply, in one write; its length is put beside the headers."""
        self.has_started = True
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        self._wire.write(head if self._is_head else head + body)
        self._end()

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """The head of a reply that is written in pieces, of exactly `length` bytes where that is known."""
        self.has_started = True
        if length is not None:
            self._is_chunked = False
            self._wire.write(self._head(status, headers, b"content-length: %d\r\n" % length))
            return
        self._keeps_open = self._keeps_open and self._is_chunked
        self._wire.write(self._head(status, headers, b"transfer-encoding: chunked\r\n" if self._is_chunked else b""))

    async def drained(self) -> None:
        """Returns when the client has taken most of what was written: between pieces of a large reply."""
        await self._wire.drained()

    def write(self, data: bytes) -> None:
        """Some of the body; nothing is sent of an empty piece, which as a chunk would be the end."""
        if data and not self._is_head:
            self._wire.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> None:
        """The end of the body."""
        if self._is_chunked and not self._is_head:
            self._wire.write(b"0\r\n\r\n")
        self._end()

    def close_after(self) -> None:
        """Makes this the last reply of its connection; before it has begun."""
        self._keeps_open = False

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        lines = [STATUS_LINES[status], self._wire.reply_head(), framing, self.extra]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if not self._keeps_open:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _end(self) -> None:
        self.is_over = True
        self._wire.reply_ended(keeps_open=self._keeps_open)
