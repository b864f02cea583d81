"""Wires one worker process together, and carries it through start, service, drain and end.

`build` is the one place that knows all parts. Nothing here decides how requests or models are handled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import grpc

from naru_proto.beats import until_beat_s
from naru_proto.errors import InternalError, NaruError, Unavailable
from naru_proto.v1 import worker_pb2_grpc
from naru_worker.adapters import cores, machine
from naru_worker.adapters.announcement import Announcement
from naru_worker.adapters.departure import Departure
from naru_worker.adapters.disk_loader import disk_loader
from naru_worker.adapters.engine.backend import backend_isa
from naru_worker.adapters.engine.deltas import Outbox
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loader import Loader
from naru_worker.adapters.engine.loading_threads import LoadingThreads
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.operations import Operations
from naru_worker.adapters.memory.bookings import Bookings
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.adapters.metrics import MetricsServer, WorkerSample, ask_loop
from naru_worker.adapters.model_memory import ModelMemory, open_memory, open_sleep_slots
from naru_worker.adapters.ranks import end_ranks, open_ranks
from naru_worker.adapters.registry import LeaseKeeper
from naru_worker.adapters.server.board import RequestBoard
from naru_worker.adapters.server.channel import server_options
from naru_worker.adapters.server.health import Health
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.adapters.server.servicer import WorkerServicer
from naru_worker.adapters.worker_sample import sample_gpu, sample_worker
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask
from naru_worker.core.hub.hub import Hub
from naru_worker.core.residency import ModelSpec, ModelState
from naru_worker.settings import WorkerSettings, split_address

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool
    from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup

_log = logging.getLogger(__name__)

HOST_SHARE = 0.1
"""Of the memory this process may use, for weights that wait in host memory, where no budget of theirs is set."""
FLUSH_TIMEOUT_S = 2.0
"""For last deltas to reach their readers at the end."""
WATCH_INTERVAL_S = 1.0
"""Between two looks at the engine thread: a hung step has no event."""
SWITCH_INTERVAL_S = 0.0005
"""The engine thread waits this long for the GIL when its native step is over and the server is busy; 5 ms is usual."""

SPARE_THREADS = 2
"""Unloads must not wait behind loads."""

MakeLoader = Callable[[WorkerSettings, MemoryLedger, Callable[[], bool]], Loader]
"""From settings, the ledger, and whether the engines have work."""


class StartError(Exception):
    """The worker cannot start; the message is a sentence for a person."""


class WorkerApp:
    """A built worker. Use `start`, then wait for `stopped` or call `shut_down`."""

    def __init__(
        self,
        settings: WorkerSettings,
        make_loader: MakeLoader,
        identity: WorkerIdentity,
        memory: ModelMemory,
        ranks: RankGroup | None = None,
        sleep_slots: PinnedPool | None = None,
    ) -> None:
        """Must be called in the asyncio thread. `ranks`: processes that models are cut over, ended with the worker.
        `sleep_slots`: where weights wait that leave a GPU.
        """
        self.sleep_slots = sleep_slots
        self._settings = settings
        self._ranks = ranks
        self._identity = identity
        self._aio = asyncio.get_running_loop()
        self.loop = EngineLoop(self._publish, self._on_engine_death, settings.engine.stream_interval_s)
        budget_bytes = settings.memory.memory_budget_bytes or memory.default_budget_bytes()
        ledger = MemoryLedger(budget_bytes, settings.memory.high_watermark)
        operations = Operations(
            make_loader(settings, ledger, lambda: self.loop.is_busy),
            self.loop,
            memory,
            Bookings(ledger),
            self._drain_model,
            settings.server.load_timeout_s,
            LoadingThreads(settings.residency.max_loads + settings.residency.max_fetches + SPARE_THREADS),
        )
        self.hub = ModelHub(Hub(hub_config(settings, budget_bytes)), operations, time.monotonic)
        self.board = RequestBoard(
            self.loop,
            self.hub,
            max_num_requests=settings.server.max_num_requests,
            max_message_bytes=settings.server.max_message_bytes,
            hold_timeout_s=settings.server.hold_timeout_s,
        )
        self.hub.attach(self.board)
        self.health = Health()
        self._servicer = WorkerServicer(
            identity, self.board, self.hub, self.loop, self.drain, settings.server, settings.memory
        )
        self.address = ""
        self.metrics_address = ""
        self.exit_code = 0
        self.stopping = asyncio.Event()
        """Set when the process is to leave: by a signal, or because the engine is dead."""
        self._server: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None
        self._announcement: Announcement | None = None
        """None: the worker is not announced anywhere."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def worker_id(self) -> str:
        """Its name in the route map."""
        return self._identity.worker_id

    @property
    def is_leaving(self) -> bool:
        """Asked to end, and serving until its models are elsewhere."""
        return self._announcement is not None and self._announcement.is_leaving

    @property
    def lease(self) -> LeaseKeeper | None:
        """Who keeps its entry in the route map; None: there is none."""
        return self._announcement.lease if self._announcement is not None else None

    async def start(self) -> None:
        """Begins to serve.

        Raises:
            StartError: an address cannot be had.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if self._ranks is not None:
            self._ranks.tell_loss(self._on_engine_death)
        server_settings = self._settings.server
        self._server = self._make_server()
        self.address = self._bind(self._server)
        self._start_metrics()
        self.loop.start()
        await self._server.start()
        self.health.is_serving = True
        self.health.is_registered = not self._settings.registry.redis_url
        await self.health.publish()
        self._spawn(self._watch())
        if self._settings.registry.redis_url:
            address = server_settings.advertise or self.address
            registry = self._settings.registry
            self._announcement = Announcement(registry, self._identity, self.hub, address, self._on_registered)
            for work in self._announcement.work():
                self._spawn(work)
        for entry in server_settings.load:
            name, _, uri = entry.partition("=")
            self._spawn(self._load(name, uri))

    def drain(self) -> None:
        """Stops admission; running requests go on. At once, and as often as one likes."""
        if self.hub.is_draining:
            return
        self.hub.is_draining = True
        self.health.is_serving = False
        self._spawn(self.health.publish())
        self.hub.on_change()

    def end(self, *, may_move: bool) -> bool:
        """Begins to leave: serves on while its models move, where that `may_move` and is set; asked again, drains.

        False: it stops already.
        """
        if self.stopping.is_set():
            return False
        timeout_s = self._settings.server.move_timeout_s
        announced = self._announcement
        if may_move and announced is not None and not announced.is_leaving and timeout_s > 0:
            announced.is_leaving = True
            self._spawn(Departure(self.hub, announced.lease, timeout_s).run(self.stopping.set))
        else:
            _log.info("asked to end: draining")
            self.stopping.set()
        return True

    async def shut_down(self) -> int:
        """Drains, ends what does not finish in time, and gives everything back. Returns the exit code."""
        self.drain()
        if self.exit_code == 0 and not await self.board.wait_idle(None, self._settings.server.drain_timeout_s):
            self.board.fail(self.board, Unavailable("the worker is shutting down; ask another one"))
            await self.board.wait_idle(None, FLUSH_TIMEOUT_S)
        self._servicer.finish_streams()
        if self._server is not None:
            await self._server.stop(FLUSH_TIMEOUT_S)
        if self.exit_code == 0:
            await self.hub.close(FLUSH_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        has_ended = self.exit_code == 0 and await asyncio.to_thread(self.loop.stop, FLUSH_TIMEOUT_S)
        if self._ranks is not None:
            await end_ranks(self._ranks, is_idle=has_ended)
        return self.exit_code

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options(self._settings.server.max_message_bytes))
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, server)
        self.health.attach(server)
        return server

    def _bind(self, server: grpc.aio.Server) -> str:
        listen = self._settings.server.listen
        host, _ = split_address("listen", listen)
        try:
            port = server.add_insecure_port(listen)
        except RuntimeError as exc:
            raise StartError(f"cannot listen on {listen}: the port is in use or not ours; set --listen") from exc
        return f"{host}:{port}"

    def _start_metrics(self) -> None:
        listen = self._settings.server.metrics_listen
        if listen == "off":
            return
        host, port = split_address("metrics_listen", listen)
        try:
            self._metrics = MetricsServer(host.strip("[]"), port, ask_loop(self._aio, self._sample))
        except OSError as exc:
            raise StartError(f"cannot serve metrics on {listen}: {exc.strerror}; set --metrics-listen") from exc
        self._metrics.start()
        self.metrics_address = f"{host}:{self._metrics.port}"

    # --- the engine thread speaks ----------------------------------------------------------------------------------

    def _publish(self, outbox: Outbox) -> None:
        self._aio.call_soon_threadsafe(self.board.dispatch, outbox)

    def _on_engine_death(self, exc: BaseException) -> None:
        why = exc.message if isinstance(exc, NaruError) else f"the engine has stopped ({type(exc).__name__})"
        try:
            self._aio.call_soon_threadsafe(self._die, why, exc)
        except RuntimeError:
            # The asyncio loop is closed: the process is leaving anyway.
            return

    def _die(self, why: str, exc: BaseException | None = None) -> None:
        """Says what happened, ends all requests, and lets the process leave with an error."""
        if self.exit_code:
            return
        self.exit_code = 1
        self.health.is_alive = False
        _log.critical("%s; this worker ends", why, exc_info=exc)
        self.drain()
        self._spawn(self.health.publish())
        # A failed device is no request's fault: to routers it is as a worker that leaves, from which all moves.
        kind = Unavailable if isinstance(exc, NaruError) else InternalError
        self.board.engine_died(kind(f"{why}; ask another worker"))
        self.stopping.set()

    async def _watch(self) -> None:
        """A step that hangs in native code raises nothing: it is seen by its length."""
        limit_s = self._settings.engine.step_timeout_s
        while True:
            await asyncio.sleep(until_beat_s(self._aio.time(), min(WATCH_INTERVAL_S, limit_s / 2)))
            if self.loop.stuck_for_s() > limit_s:
                self._die(f"a step of the engine has taken more than {limit_s:g} s")
                return

    # --- small parts ------------------------------------------------------------------------------------------------

    async def _drain_model(self, model: LoadedModel, timeout_s: float | None) -> None:
        await self.board.drain(model, timeout_s)

    async def _load(self, name: str, uri: str) -> None:
        """A model named at start; a failure is told and kept, the worker serves on."""
        try:
            async for progress in self.hub.load(Ask(name, 0, ModelSpec(uri))):
                if progress.state is ModelState.READY:
                    print(f"naru-worker {self._identity.worker_id} loaded {name}", flush=True)
                elif progress.error is not None:
                    _log.error("model %s did not load: %s", name, progress.error.message)
        except NaruError as error:
            _log.error("model %s did not load: %s", name, error.message)

    def _on_registered(self) -> None:
        self.health.is_registered = True
        self._spawn(self.health.publish())

    async def _sample(self) -> WorkerSample:
        gpu = sample_gpu(self.sleep_slots) if self._settings.engine.backend == "cuda" else None
        return await sample_worker(self.hub, self.loop, is_serving=self.health.is_serving, gpu=gpu)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._aio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def build(settings: WorkerSettings, make_loader: MakeLoader | None = None) -> WorkerApp:
    """All parts of one worker process.

    Raises:
        StartError: the environment forces kernels that do not run here, or the backend needs GPUs that are not there.
    """
    threads = cores.compute_threads(settings.engine.num_threads)
    for warning in (threads.warning, machine.huge_pages_warning()):
        if warning:
            _log.warning("%s", warning)
    identity = WorkerIdentity(
        worker_id=settings.server.worker_id or f"{socket.gethostname()}-{os.getpid()}",
        incarnation=secrets.token_hex(6),
        backend=settings.engine.backend,
        isa=_isa(settings),
        num_threads=threads.count,
        num_accelerators=settings.engine.num_accelerators,
    )
    memory = _memory(settings)
    try:
        ranks = open_ranks(settings.engine)
    except NaruError as error:
        raise StartError(error.message) from error
    slots = open_sleep_slots(settings.engine.backend, host_budget_bytes(settings))
    make_loader = make_loader or functools.partial(disk_loader, ranks, slots)
    return WorkerApp(settings, make_loader, identity, memory, ranks, slots)


def _memory(settings: WorkerSettings) -> ModelMemory:
    try:
        return open_memory(settings.engine.backend, settings.engine.num_accelerators)
    except ImportError as error:
        raise StartError(f"backend 'cuda' cannot be used here: {error}; install naru[cuda]") from error
    except NaruError as error:
        raise StartError(f"backend 'cuda' cannot be used here: {error}") from error


def _isa(settings: WorkerSettings) -> str:
    try:
        return backend_isa(settings.engine.backend)
    except (NaruError, ValueError) as error:
        raise StartError(str(error)) from error


def hub_config(settings: WorkerSettings, budget_bytes: int) -> HubConfig:
    """The hub's limits, with so many bytes for loaded models."""
    memory, residency = settings.memory, settings.residency
    return HubConfig(
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes(settings),
        high_watermark=memory.high_watermark,
        low_watermark=memory.low_watermark,
        max_loads=residency.max_loads,
        max_fetches=residency.max_fetches,
        guard_loads=residency.load_guard,
        fair_wait_s=residency.fair_wait_s,
    )


def host_budget_bytes(settings: WorkerSettings) -> int:
    """For weights that wait in host memory."""
    num_bytes = settings.memory.host_budget_bytes
    return int(HOST_SHARE * machine.memory_limit_bytes()) if num_bytes < 0 else num_bytes
