"""The HTTP server: listens, keeps the connections, and ends those whose time is over. Wired and driven by the app.

Why none of the usual servers: designs/0006-the-router-s-http-server.md.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence

from naru_proto.beats import until_beat_s
from naru_router.adapters.http.backlog import Backlog
from naru_router.adapters.http.connection import HttpConnection
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.tls_files import TlsFiles

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5
HANDSHAKE_TIMEOUT_S = 10.0
"""Of TLS; then the client is dropped."""

Handle = Callable[[HttpRequest, Reply], Coroutine[None, None, None]]


class HttpServer:
    """Serves one handler on one socket. Needs a running event loop."""

    def __init__(
        self,
        handle: Handle,
        *,
        max_body_bytes: int,
        max_unsent_bytes: int,
        send_timeout_s: float,
        is_leaving: Callable[[], bool],
        on_slow_client: Callable[[], None] = lambda: None,
        is_streamed: Callable[[bytes, bytes], bool] = lambda method, target: False,
        tls: TlsFiles | None = None,
    ) -> None:
        """Does not listen yet.

        Args:
            handle: answers a request.
            max_body_bytes: of one request.
            max_unsent_bytes: of replies, over all connections; see `Backlog`.
            send_timeout_s: after which a client that takes nothing is disconnected.
            is_leaving: whether the process is to end, so that each reply is the last one of its connection.
            on_slow_client: called for each client that is disconnected as it does not take its reply.
            tls: what connections are served with; None: plain.
            is_streamed: whether the body of a request with this method and target is handed on as it comes.
        """
        self.handle = handle
        self.loop = asyncio.get_running_loop()
        self.max_body_bytes = max_body_bytes
        self.is_leaving = is_leaving
        self.is_streamed = is_streamed
        self.connections: set[HttpConnection] = set()
        self.backlog = Backlog(max_unsent_bytes, send_timeout_s, self.loop.time, on_end=on_slow_client)
        self.date_line = b""
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._listeners: Sequence[socket.socket] = ()
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._is_used = asyncio.Event()
        """There are connections."""

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Serves listening sockets."""
        self._renew_date()
        self._listeners = listeners
        if self._tls is None:
            self._servers = [await self._serve(listener) for listener in listeners]
        else:
            await self._serve_with(self._tls.context())
        self._sweeper = asyncio.create_task(self._sweep(), name="http connections")

    def take(self, connection: HttpConnection) -> None:
        """A client has come; the connection leaves `connections` by itself."""
        self.connections.add(connection)
        if not self._is_used.is_set():
            self._is_used.set()
            self._renew_date()

    async def wait(self) -> None:
        """Raises when the server ends that should not."""
        assert self._sweeper is not None  # started
        await self._sweeper

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets replies finish for the grace, then drops what is left."""
        if self._sweeper is None:
            return
        await self._close(self._servers)
        if self._tls is not None:
            for listener in self._listeners:
                listener.close()
        deadline_s = self.loop.time() + grace_s
        while self.connections and self.loop.time() < deadline_s:
            for connection in [each for each in self.connections if each.is_idle]:
                connection.close()
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.abort()
        self._sweeper.cancel()
        await asyncio.gather(self._sweeper, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()

    async def _sweep(self) -> None:
        while True:
            if self._tls is None and not self.connections:
                self._is_used.clear()
                await self._is_used.wait()
            await asyncio.sleep(until_beat_s(self.loop.time(), SWEEP_INTERVAL_S))
            self._renew_date()
            now_s = self.loop.time()
            for connection in [each for each in self.connections if each.deadline_s < now_s]:
                connection.abort()
            self.backlog.sweep()
            if self._tls is not None:
                await self._renew_tls(self._tls)

    async def _renew_tls(self, tls: TlsFiles) -> None:
        """Has new connections served with changed files; those that stand go on with the old ones."""
        context = tls.context()
        if context is self._context:
            return
        before = self._servers
        try:
            await self._serve_with(context)
        except OSError as exc:
            logger.error("the changed TLS files are not used yet: %s", exc)
            return
        await self._close(before)

    async def _close(self, servers: Sequence[asyncio.Server]) -> None:
        """Has servers take no more connections. asyncio drops what it has accepted but not set up when they close."""
        for server in servers:
            for listener in server.sockets:
                self.loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)  # until connections that were accepted before are set up
        for server in servers:
            server.close()

    async def _serve_with(self, context: ssl.SSLContext) -> None:
        """A server's context stays: another one gets another server, on the same queue of new connections."""
        servers: list[asyncio.Server] = []
        try:
            for listener in self._listeners:
                servers.append(await self._serve(listener.dup(), context))
        except OSError:
            for server in servers:
                server.close()
            raise
        self._servers, self._context = servers, context

    async def _serve(self, listener: socket.socket, context: ssl.SSLContext | None = None) -> asyncio.Server:
        return await self.loop.create_server(
            lambda: HttpConnection(self),
            sock=listener,
            backlog=2048,
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if context is not None else None,
        )

    def _renew_date(self) -> None:
        self.date_line = b"date: %s\r\n" % email.utils.formatdate(usegmt=True).encode("ascii")
