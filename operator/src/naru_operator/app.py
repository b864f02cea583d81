"""Wires one operator process together and carries it through start, service and end. `build` is the one place that
knows all parts; nothing here decides anything about pools or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kubernetes.client.configuration import Configuration

from naru_operator.adapters.cluster.controller import ClusterController
from naru_operator.adapters.cluster.metrics import LoopMetrics
from naru_operator.adapters.cluster.term import Surroundings
from naru_operator.adapters.kube.client import ClientSettings, KubeClient
from naru_operator.adapters.kube.connection import find_configuration
from naru_operator.adapters.kube.election import Election, election_client_settings
from naru_operator.adapters.kube.health import HealthServer
from naru_operator.adapters.kube.informer import Informer
from naru_operator.adapters.kube.metrics import OperatorMetrics
from naru_operator.adapters.kube.own_pod import own_identity, own_namespace
from naru_operator.adapters.kube.pod_settings import read_pod_settings
from naru_operator.adapters.kube.schema_check import SchemaCheck
from naru_operator.adapters.kube.store import ObjectStore
from naru_operator.adapters.route_map import RouteMap, open_route_map
from naru_operator.core.leadership import Timing
from naru_operator.core.pools.model import PodSettings
from naru_operator.settings import Settings
from naru_proto.errors import Unavailable
from naru_proto.settings import SettingsError

_log = logging.getLogger(__name__)

_READER = ClientSettings(num_threads=4)
"""For lists; the loop's writes do not wait behind them."""

STALL_S = 120.0
"""A control loop that has not looked for this long hangs: liveness then fails."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Leads always, for one replica without an election; or never, before an election has begun."""

    is_leader: bool


class OperatorApp:
    """A built operator. `run` serves until cancelled."""

    def __init__(self, settings: Settings, configuration: Configuration, pod_settings: PodSettings) -> None:
        """Must be called in the asyncio thread; connects to nothing yet."""
        self._settings = settings
        self._namespace = own_namespace(settings)
        self._metrics = OperatorMetrics()
        self._configuration = configuration
        self._store = ObjectStore(settings.watched(self._namespace))
        self._route_map = _route_map(settings)
        self._leadership: Election | Fixed = Fixed(not settings.leader_election)
        self._client = KubeClient(
            configuration, ClientSettings(), may_write=self._may_write, on_answer=self._metrics.answered
        )
        self._reader = KubeClient(configuration, _READER, may_write=lambda: False, on_answer=self._metrics.answered)
        self._informer = Informer(self._reader, configuration, self._store, resync_s=settings.resync_s)
        self._schema_check = SchemaCheck(self._reader, resync_s=settings.resync_s)
        self._controller = ClusterController(
            Surroundings(
                self._store,
                self._client,
                self._route_map,
                self._may_write,
                pod_settings,
                settings.status_interval_s,
                settings.resync_s,
            )
        )
        self._metrics.follow(self._store, self._may_write)
        self._metrics.registry.register(LoopMetrics(self._controller))

    async def run(self) -> None:
        """Serves until cancelled; then lets another replica take over at once.

        Raises:
            NaruError: it cannot start: no permission to lead, an address that cannot be listened on.
        """
        # The end goes from below: the loop, its writes under way, the lease, and last what only reads.
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._route_map.close)
            await self._start_health(stack)
            stack.push_async_callback(self._reader.close)
            informer = await stack.enter_async_context(_running(self._informer.run(), "informer"))
            if self._settings.leader_election:
                await self._join_election(stack)
            stack.push_async_callback(self._client.close)
            await stack.enter_async_context(_running(self._schema_check.run(), "check of definitions"))
            controller = await stack.enter_async_context(_running(self._controller.run(), "control loop"))
            ended, _ = await asyncio.wait({informer, controller}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()

    async def _join_election(self, stack: AsyncExitStack) -> None:
        timing = Timing()
        client = KubeClient(self._configuration, election_client_settings(timing))
        stack.push_async_callback(client.close)
        identity = own_identity(self._settings)
        election = Election(client, self._namespace, identity, timing=timing, on_change=self._led)
        self._leadership = await stack.enter_async_context(election)

    async def _start_health(self, stack: AsyncExitStack) -> None:
        host, port = self._settings.health_address
        health = HealthServer((host, port), live=self._trouble, ready=self._unready, metrics=self._metrics)
        try:
            await stack.enter_async_context(health)
        except OSError as exc:
            listen = self._settings.health_listen
            raise Unavailable(f"cannot listen on {listen!r} ({exc.strerror}); set --health-listen") from exc
        print(f"naru-operator health on {host}:{health.port}", flush=True)

    def _led(self, is_leader: bool) -> None:
        _log.info("this replica %s", "acts" if is_leader else "does not act any more")
        self._controller.lead_changed(is_leader)

    def _may_write(self) -> bool:
        return self._leadership.is_leader

    def _trouble(self) -> str:
        """What is wrong with this process; empty: nothing."""
        stalled_s = self._controller.stalled_s()
        return f"the control loop has not looked for {stalled_s:.0f} s" if stalled_s > STALL_S else ""

    def _unready(self) -> str:
        """Why this replica could not act; empty: it could, whether it leads or not."""
        return "" if self._store.is_synced else self._informer.trouble or "the cluster is not listed yet"


@contextlib.asynccontextmanager
async def _running(work: Any, name: str) -> AsyncIterator[asyncio.Task[None]]:
    task: asyncio.Task[None] = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _route_map(settings: Settings) -> RouteMap:
    try:
        return open_route_map(settings.redis_url)
    except Unavailable as exc:
        raise SettingsError(exc.message) from exc


def build(settings: Settings) -> OperatorApp:
    """All parts of one operator process.

    Raises:
        SettingsError: a file or an address cannot be used, or nothing tells the operator's namespace.
        ApiAway: no way to an API server.
    """
    pod_settings = read_pod_settings(settings)
    return OperatorApp(settings, find_configuration(), pod_settings)
