"""Bodies that are handed on as they come, and replies that are written no faster than they are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from naru_proto.errors import Cancelled, InvalidRequest
from naru_router.adapters.http import body_stream as body_streams
from naru_router.adapters.http.body_stream import HIGH_BYTES, BodyStream
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.server import HttpServer
from naru_router.adapters.listeners import listen

MB = 1024 * 1024
HEAD = b"POST /up HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Site:
    """A server that hands on the bodies of POST /up."""

    def __init__(self) -> None:
        self.handle: Callable[[HttpRequest, Reply], Awaitable[None]] = self.count
        self.error: BaseException | None = None
        self.ended = asyncio.Event()

    async def count(self, request: HttpRequest, reply: Reply) -> None:
        num_bytes = 0
        if request.stream is not None:
            while data := await request.stream.read():
                num_bytes += len(data)
        reply.send(200, (), b"%b %d" % (request.target, num_bytes))

    async def serve(self, request: HttpRequest, reply: Reply) -> None:
        try:
            await self.handle(request, reply)
        except BaseException as exc:
            self.error = exc
            raise
        finally:
            self.ended.set()

    async def start(self) -> None:
        self.server = HttpServer(
            self.serve,
            max_body_bytes=1000,
            max_unsent_bytes=MB,
            send_timeout_s=30,
            is_leaving=lambda: False,
            is_streamed=lambda method, target: method == b"POST" and target == b"/up",
        )
        listener = listen("127.0.0.1", 0, "--http-port")
        self.port = listener.getsockname()[1]
        await self.server.start([listener])

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    await made.start()
    yield made
    await made.server.stop(0.1)


async def read_all(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return await reader.read()


async def test_a_body_far_above_the_limit_is_handed_on_and_the_connection_goes_on(site: Site) -> None:
    reader, writer = await site.open()
    size = 5 * MB
    writer.write(LAST.replace(b"connection: close\r\n", b"") + HEAD % (size, b""))
    for _ in range(5):
        writer.write(b"x" * MB)
        await writer.drain()
    writer.write(HEAD % (3, b"") + b"abc" + LAST)
    data = await read_all(reader)
    assert [line for line in data.split(b"\r\n") if line.startswith(b"/") or b"HTTP" in line] == [
        b"HTTP/1.1 200 OK",
        b"/last 0HTTP/1.1 200 OK",
        b"/up %dHTTP/1.1 200 OK" % size,
        b"/up 3HTTP/1.1 200 OK",
        b"/last 0",
    ]
    writer.close()


async def test_a_body_in_chunks_is_handed_on(site: Site) -> None:
    reader, writer = await site.open()
    writer.write(b"POST /up HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write((b"800\r\n" + b"x" * 2048 + b"\r\n") * 3 + b"0\r\n\r\n")
    assert (await read_all(reader)).endswith(b"/up 6144")
    writer.close()


async def test_the_socket_is_not_read_while_nobody_takes_the_body(site: Site) -> None:
    begin = asyncio.Event()
    streams: list[BodyStream] = []

    async def handle(request: HttpRequest, reply: Reply) -> None:
        assert request.stream is not None
        streams.append(request.stream)
        await begin.wait()
        await site.count(request, reply)

    site.handle = handle
    reader, writer = await site.open()
    size = 40 * MB
    writer.write(HEAD % (size, b"connection: close\r\n"))
    send = asyncio.create_task(asyncio.to_thread(lambda: b"x" * size))
    writer.write(await send)
    async with asyncio.timeout(20):
        while not streams or not streams[0].is_full:  # noqa: ASYNC110 - the stream has no event to give
            await asyncio.sleep(0.01)
    assert not streams[0].is_complete
    assert streams[0]._num_bytes < HIGH_BYTES + MB, "what came in one read of the socket beside it"
    begin.set()
    assert (await read_all(reader)).endswith(b"/up %d" % size)
    writer.close()


async def test_continue_is_said_when_the_body_is_wanted(site: Site) -> None:
    reader, writer = await site.open()
    writer.write(HEAD % (3, b"expect: 100-continue\r\nconnection: close\r\n"))
    async with asyncio.timeout(20):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert (await read_all(reader)).endswith(b"/up 3")
    writer.close()


async def test_a_body_that_is_refused_unread_ends_the_connection(site: Site) -> None:
    async def handle(request: HttpRequest, reply: Reply) -> None:
        reply.close_after()
        reply.send(400, (), b"no")

    site.handle = handle
    reader, writer = await site.open()
    writer.write(HEAD % (100 * MB, b"expect: 100-continue\r\n"))
    data = await read_all(reader)
    assert data.startswith(b"HTTP/1.1 400")
    assert b"100 Continue" not in data
    assert b"connection: close" in data
    writer.close()


async def test_a_client_that_leaves_in_its_body_ends_the_request(site: Site) -> None:
    _, writer = await site.open()
    writer.write(HEAD % (100, b"") + b"abc")
    await writer.drain()
    writer.transport.abort()
    async with asyncio.timeout(20):
        await site.ended.wait()
    assert isinstance(site.error, (asyncio.CancelledError, Cancelled))


async def test_a_client_that_stops_sending_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_streams, "READ_TIMEOUT_S", 0.05)
    stream = BodyStream(lambda: None, lambda: None)
    with pytest.raises(InvalidRequest, match=r"nothing of the body has come for 0\.05 s"):
        await stream.read()


async def test_a_reply_of_known_length_is_written_as_it_is_taken(site: Site) -> None:
    most = 0
    size, piece = 64 * MB, b"x" * (256 * 1024)

    async def handle(request: HttpRequest, reply: Reply) -> None:
        nonlocal most
        reply.begin(200, (), size)
        for _ in range(size // len(piece)):
            reply.write(piece)
            (connection,) = site.server.connections
            most = max(most, connection.unsent_bytes())
            await reply.drained()
        reply.end()

    site.handle = handle
    reader, writer = await site.open()
    writer.write(LAST)
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        got = 0
        while data := await reader.read(MB):
            got += len(data)
    assert b"content-length: %d\r\n" % size in head
    assert b"transfer-encoding" not in head
    assert got == size
    assert most < MB, "what may wait for a client"
    writer.close()
