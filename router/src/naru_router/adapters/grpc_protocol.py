"""A gRPC stream on a TCP connection, as the event loop sees it. Opened by a worker's link; `core.http2` talks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from naru_router.core.http2.stream import GrpcStream, StreamBroken


class GrpcProtocol(asyncio.Protocol):
    """One call on one connection: hands over all messages of one read at once, in the same turn of the loop."""

    def __init__(self, stream: GrpcStream, on_messages: Callable[[Sequence[bytes]], None]) -> None:
        """`on_messages` raises StreamBroken where messages make no sense."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Set when the peer has said that it speaks HTTP/2; never, where the connection ends before."""
        self.ended: asyncio.Future[str] = loop.create_future()
        """Why the stream is over."""
        self._stream = stream
        self._on_messages = on_messages
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins the call."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are no subclasses
        self._stream.start()
        self._write()

    def data_received(self, data: bytes) -> None:
        """Takes what the peer sent."""
        if self._transport is None:
            return
        try:
            messages = self._stream.receive(data)
            if messages:
                self._on_messages(messages)
        except StreamBroken as exc:
            self._end(str(exc))
            return
        if self._stream.outgoing:
            self._write()
        if self._stream.is_ready and not self.ready.done():
            self.ready.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the stream."""
        self._end(f"the connection is lost{f': {exc}' if exc else ''}")

    def send(self, message: bytes) -> None:
        """Sends a message."""
        self._stream.send(message)
        self._write()

    def close(self) -> None:
        """Tells the peer, and closes the connection."""
        if self._transport is not None:
            self._stream.cancel()
            self._write()
            self._end("closed")

    def _write(self) -> None:
        outgoing = self._stream.outgoing
        if self._transport is not None and outgoing:
            self._transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        outgoing.clear()

    def _end(self, reason: str) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if not self.ended.done():
            self.ended.set_result(reason)


async def open_stream(
    address: str, path: str, on_messages: Callable[[Sequence[bytes]], None], *, max_message_bytes: int, timeout_s: float
) -> GrpcProtocol:
    """Connects and begins the call; returns when the peer answers.

    Raises:
        TimeoutError: it does not answer in time.
        OSError: nobody listens there, or the connection ended.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise OSError(f"the address {address!r} is not host:port")
    stream = GrpcStream(address, path, max_message_bytes=max_message_bytes)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, protocol = await loop.create_connection(
            lambda: GrpcProtocol(stream, on_messages), host.strip("[]"), int(port)
        )
        either: set[asyncio.Future[Any]] = {protocol.ready, protocol.ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            protocol.close()
            raise
    if not protocol.ready.done():
        raise OSError(protocol.ended.result())
    return protocol
