"""Wires the router together: settings in, a process's worth of parts out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator

import uvicorn

from naru_proto.settings import SettingsError
from naru_router.adapters.dispatcher import Dispatcher, DispatchSettings
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.gate import Gate
from naru_router.adapters.grpc_server import GrpcServer, InferenceService
from naru_router.adapters.http.application import build_application
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.pages import Pages
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.registry import RegistryReader
from naru_router.adapters.templates import TemplateLimits, TemplateRenderer
from naru_router.core.holding import RingSettings
from naru_router.core.waiting import WaitLimits
from naru_router.settings import Settings

logger = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""For the last bytes of requests that were ended at the drain deadline."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: signals are the app's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class App:
    """A running router. `start`, then `drain` and `stop`."""

    def __init__(
        self,
        settings: Settings,
        *,
        http: _HttpServer,
        grpc: GrpcServer,
        registry: RegistryReader,
        fleet: Fleet,
        dispatcher: Dispatcher,
        renderer: TemplateRenderer,
        gate: Gate,
    ) -> None:
        self.fleet = fleet
        self.registry = registry
        self.dispatcher = dispatcher
        self.gate = gate
        self.http_port = 0
        self.grpc_port = 0
        self._settings = settings
        self._http = http
        self._grpc = grpc
        self._renderer = renderer
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens and starts reading the route map; returns when requests can come.

        Raises:
            SettingsError: a port cannot be had.
        """
        listener = _listen(self._settings.host, self._settings.http_port)
        try:
            await self._grpc.start(self._settings.host, self._settings.grpc_port)
        except OSError as exc:
            listener.close()
            raise SettingsError(str(exc)) from exc
        self.http_port = listener.getsockname()[1]
        self.grpc_port = self._grpc.port
        self._tasks = [
            asyncio.create_task(self.registry.run(), name="registry"),
            asyncio.create_task(self._http.serve(sockets=[listener]), name="http"),
        ]
        await self._http.has_started.wait()
        await self._grpc.set_serving(True)

    async def wait(self) -> None:
        """Returns or raises when a part ends that should not."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self) -> None:
        """Turns readiness off, then refuses new requests, and ends at the deadline those that have not finished."""
        self.gate.is_leaving = True
        await self._grpc.set_serving(False)
        await asyncio.sleep(self._settings.leave_delay_s)
        self.gate.close()
        if not await self.gate.wait_idle(self._settings.drain_timeout_s):
            logger.warning("%d requests are ended at the drain deadline", self.gate.num_inside)
            self.dispatcher.shut_down()
            await self.gate.wait_idle(STOP_GRACE_S)

    async def stop(self) -> None:
        """Ends everything."""
        self._http.should_exit = True
        await self._grpc.stop(STOP_GRACE_S)
        if self._tasks:
            await asyncio.gather(self._tasks[1], return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.close()
        self._renderer.close()


def build(settings: Settings) -> App:
    """Makes a router of its settings. Needs a running event loop; starts nothing."""
    metrics = Metrics()
    gate = Gate()
    fleet = Fleet(id_prefix=secrets.token_hex(6), metrics=metrics)
    try:
        registry = RegistryReader(
            settings.redis_url, poll_interval_s=settings.registry_poll_s, listener=fleet.apply, metrics=metrics
        )
    except ValueError as exc:
        raise SettingsError(f"redis_url cannot be used: {exc}; it must be like redis://host:6379/0") from exc
    ring = RingSettings(settings.load_factor, settings.num_virtual_nodes)
    placing = DispatchSettings(WaitLimits(settings.model_wait_s, settings.max_waiting_per_model), ring)
    dispatcher = Dispatcher(fleet, placing, metrics, refresh=registry.refresh)
    limits = TemplateLimits(settings.template_max_steps, settings.template_max_chars, settings.template_timeout_s)
    renderer = TemplateRenderer(limits)
    jobs = JobMaker(fleet, ModelFacts(fleet, dispatcher, refresh=registry.refresh), renderer, metrics)
    edge = Edge(jobs, dispatcher, gate, metrics, settings.max_body_bytes)
    application = build_application(edge, Pages(fleet, registry, gate, metrics))
    config = uvicorn.Config(
        application,
        lifespan="off",
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(STOP_GRACE_S),
    )
    grpc = GrpcServer(InferenceService(fleet, jobs, dispatcher, gate, metrics), settings.max_body_bytes)
    return App(
        settings,
        http=_HttpServer(config),
        grpc=grpc,
        registry=registry,
        fleet=fleet,
        dispatcher=dispatcher,
        renderer=renderer,
        gate=gate,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        SettingsError: the address cannot be had.
    """
    # asyncio turns Nagle's algorithm off only where the protocol number says TCP; 0, the default, would cost 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        message = f"HTTP cannot listen on {host}:{port}: {exc.strerror}; free the port or set --http-port"
        raise SettingsError(message) from exc
    return listener
