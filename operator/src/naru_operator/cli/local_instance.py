"""One running `naru up`: wires supervisor, Redis, router and controller; starts them in order, stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from naru_operator.adapters import local_processes
from naru_operator.adapters.child_process import ProcessSpec
from naru_operator.adapters.ports import bracketed
from naru_operator.adapters.redis_server import READY_TEXT, redis_process
from naru_operator.adapters.router_probe import listed_models
from naru_operator.adapters.supervisor import ProcessExit, Supervisor
from naru_operator.cli.up_events import UpEvents, start_failure
from naru_operator.core.desired import DesiredPool, DesiredState
from naru_proto.errors import NaruError, Unavailable

if TYPE_CHECKING:
    from naru_operator.adapters.controller import Controller
    from naru_operator.adapters.route_map import Board, RouteMap

_READY_POLL_S = 0.02
_ROUTER_GRACE_S = 35.0
"""A little over the router's own drain timeout."""
_WORKER_SPARE_S = 5.0
_REDIS_GRACE_S = 5.0
_CLEAN_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where an instance listens, and where it keeps its files."""

    host: str
    http_port: int
    grpc_port: int
    folder: Path
    more_ports: tuple[tuple[int, int], ...] = ()
    """HTTP and gRPC ports of the second router and those after it."""
    tenants_file: Path | None = None
    """Who may ask; None: everybody."""
    files_dir: Path | None = None
    """What clients upload and have stored: it outlives the instance. None: nothing of that is offered."""

    @property
    def ports(self) -> dict[str, tuple[int, int]]:
        """HTTP and gRPC ports of all routers by their processes' names."""
        more = {f"router#{number}": ports for number, ports in enumerate(self.more_ports, 2)}
        return {"router": (self.http_port, self.grpc_port), **more}

    @property
    def more_http_urls(self) -> tuple[str, ...]:
        """As http_url, of the other routers."""
        return tuple(f"http://{bracketed(self.reachable_host)}:{http_port}" for http_port, _ in self.more_ports)

    @property
    def reachable_host(self) -> str:
        """The host to ask from this machine: all addresses include loopback."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def http_url(self) -> str:
        """Base address of the HTTP API, from this machine."""
        return f"http://{bracketed(self.reachable_host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC API, from this machine."""
        return f"{bracketed(self.reachable_host)}:{self.grpc_port}"


class LocalInstance:
    """All parts of one instance. `start`, `wait_ready`, then `stop`, also after a failure of either."""

    def __init__(self, endpoints: Endpoints, events: UpEvents, *, redis_program: Path | None, redis_url: str) -> None:
        self._redis_url = redis_url
        self._endpoints = endpoints
        self._events = events
        self._redis_program = redis_program
        """None: the Redis at that URL is somebody else's."""
        self._supervisor = Supervisor(self._line, self._exited)
        self._redis_listens = asyncio.Event()
        self._first_exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._is_ready = False
        self._first_workers: dict[str, DesiredPool] = {}
        self._route_map: RouteMap | None = None
        self._controller: Controller | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self, desired: DesiredState) -> None:
        """Starts Redis, waits for it, then starts router and workers; the workers are told what to load.

        Raises:
            Unavailable: a part cannot run.
        """
        try:
            if self._redis_program is None:
                await self._open_route_map()
            else:
                await self._supervisor.start(redis_process(self._redis_program, self._endpoints.folder))
                await self._unless_exit(self._redis_listens.wait())
            await self._start_parts(desired)
        except OSError as exc:
            raise Unavailable(f"a process cannot be started ({exc.strerror}); free memory or processes") from exc
        route_map = self._route_map or await self._open_route_map()
        controller = await asyncio.to_thread(importlib.import_module, "naru_operator.adapters.controller")
        self._controller = controller.Controller(
            route_map, self._supervisor, self._worker_process, self._events, started=self._first_workers
        )
        self._controller.desire(desired)
        self._loop_task = asyncio.create_task(self._controller.run(), name="controller")

    async def _start_parts(self, desired: DesiredState) -> None:
        """The first workers need no plan: they start at once, so that their imports run beside our own."""
        it = self._endpoints
        for name, (http_port, grpc_port) in it.ports.items():
            await self._supervisor.start(
                local_processes.router_process(
                    name, self._redis_url, it.host, http_port, grpc_port, it.tenants_file, it.files_dir
                )
            )
        for pool in desired.pools:
            for worker_id in pool.worker_ids():
                await self._supervisor.start(self._worker_process(worker_id, pool))
                self._first_workers[worker_id] = pool

    async def _open_route_map(self) -> RouteMap:
        """Imported late and in a thread: the client of Redis takes longer to import than the server to start."""
        module = await asyncio.to_thread(importlib.import_module, "naru_operator.adapters.route_map")
        opened: RouteMap = module.open_route_map(self._redis_url)
        self._route_map = opened
        await opened.ping()
        return opened

    def _worker_process(self, worker_id: str, pool: DesiredPool) -> ProcessSpec:
        return local_processes.worker_process(worker_id, pool, self._redis_url)

    async def wait_ready(self, desired: DesiredState) -> None:
        """Returns when the router serves and each model was loaded somewhere (on demand: is known to a worker), or has
        failed while others have not.

        Raises:
            Unavailable: a part ended before it was ready.
            NaruError: no model could be loaded; the first one's reason.
        """
        assert self._controller is not None

        def is_settled(board: Board) -> bool:
            # Loaded once is enough: where not all fit, a worker may have evicted the first for the last by now.
            settled = self._events.settled_models | self._events.failed_models.keys()
            return all(m.name in settled or is_ready(board, m.name) for m in desired.models)

        await self._unless_exit(self._controller.wait_for(is_settled))
        failed = self._events.failed_models
        if len(failed) == len(desired.models):
            raise failed[desired.models[0].name]
        await self._unless_exit(self._router_serves({m.name for m in desired.models if m.name not in failed}))
        self._is_ready = True

    def desire(self, desired: DesiredState) -> None:
        """Carries out another desired state from now on."""
        assert self._controller is not None
        self._controller.desire(desired)

    async def stop(self) -> None:
        """Ends everything in order: the routers while workers still serve it, then the workers, Redis last."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        await asyncio.gather(*(self._supervisor.stop(name, _ROUTER_GRACE_S) for name in self._endpoints.ports))
        workers = self._first_workers if self._controller is None else self._controller.workers
        stops = (self._supervisor.stop(name, pool.drain_timeout_s + _WORKER_SPARE_S) for name, pool in workers.items())
        await asyncio.gather(*stops)
        if self._route_map is not None:
            if self._redis_program is None:
                await self._take_back_models(self._route_map)
            await self._route_map.close()
        await self._supervisor.stop("redis", _REDIS_GRACE_S)

    def kill(self) -> None:
        """Ends all children at once; `stop` then has nothing to wait for."""
        self._supervisor.kill_all()

    async def _take_back_models(self, route_map: RouteMap) -> None:
        """A Redis of somebody else keeps no model that nothing serves."""
        with contextlib.suppress(NaruError, TimeoutError):
            async with asyncio.timeout(_CLEAN_UP_S):
                await route_map.write_models((), (await route_map.read()).models)

    def _line(self, name: str, text: str) -> None:
        if name == "redis" and READY_TEXT in text:
            self._redis_listens.set()
        self._events.line(name, text)

    def _exited(self, ended: ProcessExit) -> None:
        if not self._is_ready and not self._first_exit.done():
            self._events.tail(ended)
            self._first_exit.set_result(ended)
        elif self._is_ready:
            self._events.exited(ended)
        if self._controller is not None:
            self._controller.worker_ended(ended.name)

    async def _unless_exit(self, waiting: Coroutine[Any, Any, Any]) -> None:
        """Waits for something, but not past the end of a part."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task, self._first_exit}, return_when=asyncio.FIRST_COMPLETED)
            if self._first_exit.done():
                raise start_failure(self._first_exit.result())
            task.result()
        finally:
            task.cancel()

    async def _router_serves(self, models: set[str]) -> None:
        """The router has no event to wait for: it is asked until it lists the models."""
        it = self._endpoints
        for http_port, _ in it.ports.values():
            while not models <= (await listed_models(it.reachable_host, http_port) or set()):  # noqa: ASYNC110
                await asyncio.sleep(_READY_POLL_S)


def is_ready(board: Board, model: str) -> bool:
    """Whether any worker serves the model."""
    held = (worker.models.get(model) for worker in board.workers.values() if not worker.draining)
    return any(resident is not None and resident.state == "ready" for resident in held)
