"""The HTTP server without a router behind it: framing, order, limits, what clients do wrong, and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from naru_router.adapters.http import connection as connections
from naru_router.adapters.http import server as servers
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.server import HttpServer
from naru_router.adapters.listeners import listen

Handle = Callable[[HttpRequest, Reply], Awaitable[None]]
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Site:
    """A server with a handler of the test's own."""

    def __init__(self) -> None:
        self.seen: list[HttpRequest] = []
        self.handle: Handle = self.echo
        self.is_leaving = False
        self.server: HttpServer
        self.port = 0
        self.cancelled = 0

    async def echo(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(
            200, ((b"content-type", b"text/plain"),), request.method + b" " + request.target + b" " + request.body
        )

    async def _serve(self, request: HttpRequest, reply: Reply) -> None:
        self.seen.append(request)
        try:
            await self.handle(request, reply)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def start(self, *, max_unsent_bytes: int = 1 << 20, send_timeout_s: float = 30.0) -> None:
        self.server = HttpServer(
            self._serve,
            max_body_bytes=10_000,
            max_unsent_bytes=max_unsent_bytes,
            send_timeout_s=send_timeout_s,
            is_leaving=lambda: self.is_leaving,
        )
        listener = listen("127.0.0.1", 0, "--http-port")
        self.port = listener.getsockname()[1]
        await self.server.start([listener])

    async def talk(self, *pieces: bytes) -> bytes:
        """All that comes until the server closes; the last request should ask for that."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(20):
            data = await reader.read()
        writer.close()
        await writer.wait_closed()
        return data

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the server has no event to give
                await asyncio.sleep(0.01)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    yield made
    await made.server.stop(0.1)


def bodies(data: bytes) -> list[bytes]:
    """The bodies of replies that follow one another on one connection, each with its length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        found.append(rest[:length])
        data = rest[length:]
    return found


def post(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{header}\r\n" for header in headers)
    return f"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body


LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_replies_come_in_the_order_of_requests_sent_ahead(site: Site) -> None:
    release = asyncio.Event()

    async def handle(request: HttpRequest, reply: Reply) -> None:
        if request.target == b"/slow":
            await release.wait()
        await site.echo(request, reply)

    site.handle = handle
    await site.start()
    requests = [b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n", *(post(b"%d" % i) for i in range(40)), LAST]
    talk = asyncio.create_task(site.talk(b"".join(requests)))
    await site.until(lambda: len(site.seen) == 1)
    release.set()
    expected = [b"GET /slow ", *(b"POST /x %d" % i for i in range(40)), b"GET /last "]
    assert bodies(await talk) == expected


async def test_a_body_may_come_byte_by_byte_and_in_chunks(site: Site) -> None:
    await site.start()
    chunked = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    data = await site.talk(*[bytes([byte]) for byte in post(b"hello") + chunked + LAST])
    assert bodies(data) == [b"POST /x hello", b"POST /x abcde", b"GET /last "]


async def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(site: Site) -> None:
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    whole = post(b"hello", "expect: 100-continue", "connection: close")
    writer.write(whole[:-5])
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert bodies(await reader.read()) == [b"POST /x hello"]
    writer.close()
    await writer.wait_closed()


async def test_hop_by_hop_headers_stay_on_their_hop(site: Site) -> None:
    await site.start()
    wishes = ("connection: X-Secret, keep-alive", "x-secret: 1", "accept-encoding: gzip", "te: trailers")
    head = (await site.talk(post(b"hi", *wishes), LAST)).partition(b"\r\n\r\n")[0].lower()
    names = {line.split(b":")[0] for line in head.split(b"\r\n")[1:]}
    assert names == {b"date", b"content-length", b"content-type"}


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_is_not_http_is_400_and_the_end(site: Site, data: bytes) -> None:
    await site.start()
    assert (await site.talk(data)).startswith(b"HTTP/1.1 400 ")
    await site.until(lambda: not site.server.connections)
    assert site.seen == []


async def test_a_head_without_an_end_is_431_and_the_end(site: Site) -> None:
    await site.start()
    for head in (
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ):
        assert (await site.talk(head)).startswith(b"HTTP/1.1 431 ")
    assert site.seen == []


async def test_a_reply_to_a_body_that_is_too_large_can_be_read(site: Site) -> None:
    async def refuse(request: HttpRequest, reply: Reply) -> None:
        assert request.is_body_too_large and len(request.body) <= 10_000
        reply.send(400, (), b"too large")

    site.handle = refuse
    await site.start()
    for data in (
        post(b"x" * 200_000),
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"fff\r\n" + b"x" * 0xFFF,
    ):
        more = (b"\r\nfff\r\n" + b"x" * 0xFFF) * 20 if b"chunked" in data else b""
        answer = await site.talk(data, more)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"too large")
        assert b"connection: close" in answer
    assert len(site.seen) == 2


async def test_an_old_client_gets_a_stream_without_chunks(site: Site) -> None:
    async def stream(request: HttpRequest, reply: Reply) -> None:
        reply.begin(200, ())
        reply.write(b"one ")
        reply.write(b"two")
        reply.end()

    site.handle = stream
    await site.start()
    answer = await site.talk(b"GET / HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\none two") and b"chunked" not in answer and b"connection: close" in answer
    answer = await site.talk(LAST)
    assert answer.endswith(b"\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_an_empty_piece_is_not_the_end_of_a_reply(site: Site) -> None:
    async def in_pieces(request: HttpRequest, reply: Reply) -> None:
        reply.begin(200, ())
        for piece in (b"one", b"", b"two"):
            reply.write(piece)
        reply.end()

    site.handle = in_pieces
    await site.start()
    _, _, sent = (await site.talk(LAST)).partition(b"\r\n\r\n")
    assert sent == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_head_has_no_body(site: Site) -> None:
    await site.start()
    answer = await site.talk(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n" + LAST)
    first, rest = answer.split(b"\r\n\r\n", 1)
    assert b"content-length: 7" in first and rest.startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_would_rather_speak_another_protocol_is_answered_in_this_one(site: Site) -> None:
    await site.start()
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" + b"PRI * HTTP/2.0"
    answer = await site.talk(upgrade)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer and len(site.seen) == 1


async def test_a_handler_that_fails_costs_its_own_connection(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: HttpRequest, reply: Reply) -> None:
        raise RuntimeError("a fault of ours")

    site.handle = fail
    await site.start()
    with contextlib.suppress(ConnectionResetError):
        assert await site.talk(GET) == b""
    assert "a fault of ours" in caplog.text
    site.handle = site.echo
    assert bodies(await site.talk(LAST)) == [b"GET /last "]


async def test_a_client_that_leaves_cancels_its_request(site: Site) -> None:
    async def hang(request: HttpRequest, reply: Reply) -> None:
        await asyncio.Event().wait()

    site.handle = hang
    await site.start()
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(GET)
    await site.until(lambda: len(site.seen) == 1)
    writer.close()
    await writer.wait_closed()
    await site.until(lambda: site.cancelled == 1 and not site.server.connections)


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab"])
async def test_a_client_that_never_goes_on_is_disconnected(
    site: Site, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "IDLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connections, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(servers, "SWEEP_INTERVAL_S", 0.02)
    await site.start()
    with contextlib.suppress(ConnectionResetError):
        assert await site.talk(begun) == b""
    await site.until(lambda: not site.server.connections)
    assert site.seen == []


async def test_nobody_sweeps_where_nobody_is_and_the_next_reply_has_todays_date(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SWEEP_INTERVAL_S", 0.01)
    await site.start()
    site.is_leaving = True  # each reply is the last of its connection
    await site.talk(GET)
    await site.until(lambda: not site.server.connections and not site.server._is_used.is_set())
    site.server.date_line = b"date: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    answer = await site.talk(GET)
    assert b"date: " in answer and b"1970" not in answer


async def test_while_the_process_leaves_each_reply_is_the_last_of_its_connection(site: Site) -> None:
    await site.start()
    site.is_leaving = True
    answer = await site.talk(GET)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer


async def test_a_stop_waits_for_replies_and_closes_idle_connections(site: Site) -> None:
    release = asyncio.Event()

    async def handle(request: HttpRequest, reply: Reply) -> None:
        await release.wait()
        await site.echo(request, reply)

    site.handle = handle
    await site.start()
    _, idle = await asyncio.open_connection("127.0.0.1", site.port)
    talk = asyncio.create_task(site.talk(LAST))
    await site.until(lambda: len(site.seen) == 1 and len(site.server.connections) == 2)
    stop = asyncio.create_task(site.server.stop(10))
    await site.until(lambda: len(site.server.connections) == 1)
    release.set()
    assert bodies(await talk) == [b"GET /last "]
    await stop
    idle.close()
    await idle.wait_closed()


def deaf_client(port: int) -> socket.socket:
    """A client that asks and never reads; its kernel takes little for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(GET)
    return client


async def test_clients_that_never_read_hold_no_more_than_the_limit_together(site: Site) -> None:
    limit, piece = 4_000_000, b"x" * 50_000
    most = 0

    async def flood(request: HttpRequest, reply: Reply) -> None:
        nonlocal most
        reply.begin(200, ())
        while True:
            reply.write(piece)
            most = max(most, sum(each.unsent_bytes() for each in site.server.connections))
            await asyncio.sleep(0.001)

    site.handle = flood
    await site.start(max_unsent_bytes=limit)
    clients = [deaf_client(site.port) for _ in range(40)]
    await site.until(lambda: site.server.backlog.num_ended >= 30)
    # Beside what is counted, a connection may have less unsent than makes it a slow one.
    assert most <= limit + 40 * (len(piece) + 70_000)
    assert site.cancelled >= 30 - 1
    site.handle = site.echo
    assert bodies(await site.talk(LAST)) == [b"GET /last "]
    for client in clients:
        client.close()
    await site.until(lambda: not site.server.connections and site.server.backlog.num_bytes == 0)


async def test_a_client_that_takes_nothing_is_disconnected_and_one_that_is_slow_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "SWEEP_INTERVAL_S", 0.02)
    size = 8_000_000

    async def large(request: HttpRequest, reply: Reply) -> None:
        reply.begin(200, ())
        reply.write(b"x" * size)
        await asyncio.Event().wait()

    site.handle = large
    await site.start(max_unsent_bytes=100_000_000, send_timeout_s=1.0)
    deaf = deaf_client(site.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(GET)
    num_read = 0
    while site.server.backlog.num_ended < 1:
        num_read += len(await reader.read(20_000))
        await asyncio.sleep(0.01)
    await site.until(lambda: len(site.server.connections) == 1)
    assert num_read < size
    async with asyncio.timeout(20):
        while num_read < size:
            num_read += len(await reader.read(1 << 20))
    deaf.close()
    writer.close()
    await writer.wait_closed()
