"""The operator's small HTTP server: is it alive, is it ready, its numbers. Started by the app; decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from naru_operator.adapters.kube.metrics import OperatorMetrics

Check = Callable[[], str]
"""Why not, in words for a person; empty: all is well. Must be quick."""


class HealthServer:
    """`async with HealthServer(...)`: /healthz, /readyz and /metrics. An answer at all shows that the loop turns."""

    def __init__(self, address: tuple[str, int], *, live: Check, ready: Check, metrics: OperatorMetrics) -> None:
        """``address``: host and port to listen on; port 0 takes a free one."""
        self._address = address
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/healthz", _answer(live))
        app.router.add_get("/readyz", _answer(ready))
        app.router.add_get("/metrics", self._exposition)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        """Listens.

        Raises:
            OSError: the address cannot be had.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, *self._address).start()
        except OSError:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops listening."""
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._runner.addresses[0][1])

    async def _exposition(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": self._metrics.content_type})


def _answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_request: web.Request) -> web.Response:
        trouble = check()
        return web.Response(status=503 if trouble else 200, text=trouble or "ok")

    return handle
