"""The HTTP server: listens, keeps the connections, and ends those whose time is over. Wired and driven by the app.

Why none of the usual servers: designs/0006-the-router-s-http-server.md.
"""

from __future__ import annotations

import asyncio
import email.utils
import socket
from collections.abc import Callable, Coroutine, Sequence

from naru_router.adapters.http.backlog import Backlog
from naru_router.adapters.http.connection import HttpConnection
from naru_router.adapters.http.messages import HttpRequest, Reply

SWEEP_INTERVAL_S = 0.5

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
    ) -> None:
        """Does not listen yet.

        Args:
            handle: answers a request.
            max_body_bytes: of one request.
            max_unsent_bytes: of replies, over all connections; see `Backlog`.
            send_timeout_s: after which a client that takes nothing is disconnected.
            is_leaving: whether the process is to end, so that each reply is the last one of its connection.
            on_slow_client: called for each client that is disconnected as it does not take its reply.
        """
        self.handle = handle
        self.loop = asyncio.get_running_loop()
        self.max_body_bytes = max_body_bytes
        self.is_leaving = is_leaving
        self.connections: set[HttpConnection] = set()
        self.backlog = Backlog(max_unsent_bytes, send_timeout_s, self.loop.time, on_end=on_slow_client)
        self.date_line = b""
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Serves listening sockets."""
        self._renew_date()
        for listener in listeners:
            server = await self.loop.create_server(lambda: HttpConnection(self), sock=listener, backlog=2048)
            self._servers.append(server)
        self._sweeper = asyncio.create_task(self._sweep(), name="http connections")

    async def wait(self) -> None:
        """Raises when the server ends that should not."""
        assert self._sweeper is not None  # started
        await self._sweeper

    async def stop(self, grace_s: float) -> None:
        """Takes no new connections, lets replies finish for the grace, then drops what is left."""
        if self._sweeper is None:
            return
        for server in self._servers:
            server.close()
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
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._renew_date()
            now_s = self.loop.time()
            for connection in [each for each in self.connections if each.deadline_s < now_s]:
                connection.abort()
            self.backlog.sweep()

    def _renew_date(self) -> None:
        self.date_line = b"date: %s\r\n" % email.utils.formatdate(usegmt=True).encode("ascii")
