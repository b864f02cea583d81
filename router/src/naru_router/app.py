"""Wires the router together: settings in, a process's worth of parts out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from starlette.routing import Route

from naru_proto.registry import RouterRecord
from naru_proto.settings import SettingsError
from naru_router.adapters.chooser import DispatchSettings
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.fleet_workers import FleetWorkers
from naru_router.adapters.gate import Gate
from naru_router.adapters.grpc_inference import InferenceService
from naru_router.adapters.grpc_oip import OpenInferenceService
from naru_router.adapters.grpc_server import GrpcServer
from naru_router.adapters.http.anthropic import CountTokensEndpoint, MessagesEndpoint
from naru_router.adapters.http.application import Application, Endpoint
from naru_router.adapters.http.chat import ChatEndpoint
from naru_router.adapters.http.completions import CompletionEndpoint
from naru_router.adapters.http.counts import Counts
from naru_router.adapters.http.embeddings import EmbeddingEndpoint
from naru_router.adapters.http.explain import PlacementPages
from naru_router.adapters.http.files import is_upload
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.oip import oip_endpoints, oip_patterns
from naru_router.adapters.http.oip_pages import OipPages
from naru_router.adapters.http.openapi_page import OpenApiPage
from naru_router.adapters.http.pages import Pages
from naru_router.adapters.http.request_pages import RequestPages
from naru_router.adapters.http.rerank import RerankEndpoint, ScoreEndpoint
from naru_router.adapters.http.response_pages import ResponsePages
from naru_router.adapters.http.responses_api import InputTokensEndpoint, ResponsesEndpoint
from naru_router.adapters.http.server import HttpServer
from naru_router.adapters.http.stored import stored
from naru_router.adapters.http.tokenize import DetokenizeEndpoint, TokenizeEndpoint
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.keeper.loop import KeeperLoop
from naru_router.adapters.keeper.sight import Sight
from naru_router.adapters.leases import Leases, connect
from naru_router.adapters.listeners import listen
from naru_router.adapters.load_desk import LoadDesk
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.oip_calls import OipCalls
from naru_router.adapters.oip_repository import OipRepository
from naru_router.adapters.presence import Presence
from naru_router.adapters.registry import RegistryReader
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.adapters.templates import TemplateLimits, TemplateRenderer
from naru_router.adapters.tenancy.quota_keeper import QuotaKeeper
from naru_router.adapters.tenancy.tenancy import Tenancy
from naru_router.adapters.tls_files import tls_files
from naru_router.core.holding import RingSettings
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.overload import ShedLimits
from naru_router.core.route_map import RouteMap
from naru_router.core.token_sizes import TokenSizes
from naru_router.core.traces import Traces
from naru_router.core.waiting import WaitLimits
from naru_router.settings import Settings

logger = logging.getLogger(__name__)

FIRST_MAP_S = 1.0
"""Connections that come before the route map was read first wait for it, up to so long."""
STOP_GRACE_S = 2.0
"""For the last bytes of requests that were ended at the drain deadline."""
_WILDCARDS = ("0.0.0.0", "::", "")


class App:
    """A running router. `start`, then `drain` and `stop`."""

    def __init__(
        self,
        settings: Settings,
        *,
        http: HttpServer,
        grpc: GrpcServer,
        registry: RegistryReader,
        fleet: Fleet,
        dispatcher: Dispatcher,
        gate: Gate,
        services: Mapping[str, Callable[[], Awaitable[None]]],
        closers: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        """`services` run beside the servers by their names; `closers` are called in order at the end."""
        self.fleet = fleet
        self.registry = registry
        self.dispatcher = dispatcher
        self.gate = gate
        self.http_port = 0
        self.grpc_port = 0
        self._settings = settings
        self._http = http
        self._grpc = grpc
        self._services = services
        self._closers = closers
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Listens and starts reading the route map; returns when requests can come.

        Raises:
            SettingsError: a port cannot be had.
        """
        settings = self._settings
        listeners = [listen(settings.host, settings.http_port, "--http-port", is_shared=settings.share_ports)]
        try:
            if settings.process_port:
                listeners.append(listen(settings.host, settings.process_port, "--process-port"))
            await self._grpc.start(settings.host, settings.grpc_port)
        except (OSError, SettingsError) as exc:
            for listener in listeners:
                listener.close()
            raise SettingsError(str(exc)) from exc
        self.http_port = listeners[0].getsockname()[1]
        self.grpc_port = self._grpc.port
        self._tasks = [asyncio.ensure_future(run()) for run in self._services.values()]
        with contextlib.suppress(TimeoutError):  # a Redis that hangs: readiness says so
            async with asyncio.timeout(FIRST_MAP_S):
                await self.registry.has_tried.wait()
        await self._http.start(listeners)
        self._tasks.append(asyncio.create_task(self._http.wait(), name="http"))
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
        await asyncio.gather(self._http.stop(STOP_GRACE_S), self._grpc.stop(STOP_GRACE_S))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in self._closers:
            await close()


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the servers stand on."""

    metrics: Metrics
    gate: Gate
    traces: Traces
    fleet: Fleet
    registry: RegistryReader
    client: redis.asyncio.Redis
    presence: Presence
    quotas: QuotaKeeper
    tenancy: Tenancy
    leases: Leases
    workers: FleetWorkers
    desk: LoadDesk
    keeper: KeeperLoop
    dispatcher: Dispatcher
    renderer: TemplateRenderer
    facts: ModelFacts
    jobs: JobMaker
    edge: Edge

    @property
    def takes_requests(self) -> bool:
        """Whether requests are served now."""
        return self.registry.status.has_map and not self.gate.is_leaving

    async def close_renderer(self) -> None:
        """Ends the threads of templates."""
        self.renderer.close()


def build(settings: Settings) -> App:
    """Makes a router of its settings. Needs a running event loop; starts nothing.

    Raises:
        SettingsError: the tenants file, a file of TLS or the address of Redis cannot be used.
    """
    tls = tls_files(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    parts = _parts(settings)
    edge, fleet, tenancy = parts.edge, parts.fleet, parts.tenancy
    store = RecordStore(settings.files_dir) if settings.files_dir else None
    files = stored(
        edge,
        store,
        lambda inner: _batch_endpoints(inner, store),
        parts.leases,
        caller_named=tenancy.caller_named,
        most_in_flight=lambda: settings.batch_concurrency * max(1, fleet.num_up()),
        max_file_bytes=settings.max_file_bytes,
    )
    repository = OipRepository(fleet, parts.facts, parts.dispatcher, parts.workers, lambda: parts.takes_requests)
    oip = OipCalls(repository, parts.jobs, parts.dispatcher)
    application = Application(
        edge,
        Pages(fleet, parts.registry, parts.gate, parts.metrics, tenancy, parts.presence),
        _more_pages(parts, settings, repository, store),
        {**_chat_endpoints(edge, store), **_pooling_endpoints(edge), **files.endpoints, **oip_endpoints(edge, oip)},
        (*files.patterns, *oip_patterns(edge, oip)),
    )
    http = HttpServer(
        application.handle,
        max_body_bytes=settings.max_body_bytes,
        max_unsent_bytes=settings.max_unsent_bytes,
        send_timeout_s=settings.send_timeout_s,
        is_leaving=lambda: parts.gate.is_leaving,
        on_slow_client=parts.metrics.slow_clients.inc,
        is_streamed=is_upload,
        tls=tls,
    )
    inference = InferenceService(fleet, parts.jobs, parts.dispatcher, parts.gate, parts.metrics, tenancy.caller)
    grpc = GrpcServer(
        inference,
        settings.max_body_bytes,
        is_shared=settings.share_ports,
        open_inference=OpenInferenceService(inference.edge, oip),
        tls=tls,
    )
    services = {
        "registry": parts.registry.run,
        "presence": parts.presence.run,
        "quotas": parts.quotas.run,
        "keeper": parts.keeper.run,
        **files.services,
    }
    if settings.tenants_file:
        services["tenants"] = tenancy.run
    return App(
        settings,
        http=http,
        grpc=grpc,
        registry=parts.registry,
        fleet=fleet,
        dispatcher=parts.dispatcher,
        gate=parts.gate,
        services=services,
        closers=(*files.closers, parts.desk.close, parts.client.aclose, fleet.close, parts.close_renderer),
    )


def _parts(settings: Settings) -> _Parts:
    """The fleet, what decides over it, and what turns requests into jobs for it.

    Raises:
        SettingsError: the tenants file or the address of Redis cannot be used.
    """
    router_id = secrets.token_hex(8)
    metrics, gate, sizes, traces = Metrics(), Gate(), TokenSizes(), Traces(settings.num_traces)
    fleet = Fleet(id_prefix=secrets.token_hex(6), metrics=metrics)

    def take(route_map: RouteMap) -> None:
        fleet.seed = registry.seed
        metrics.routers.set(presence.num_routers)
        fleet.apply(route_map)

    try:
        registry = RegistryReader(
            settings.redis_url, poll_interval_s=settings.registry_poll_s, listener=take, metrics=metrics
        )
        client = connect(settings.redis_url)
    except ValueError as exc:
        raise SettingsError(f"redis_url cannot be used: {exc}; it must be like redis://host:6379/0") from exc
    presence = Presence(client, RouterRecord(router_id, _address(settings), int(time.time())))
    quotas = QuotaKeeper(client, router_id, lambda: presence.num_routers, metrics)
    tenancy = Tenancy(settings.tenants_file, quotas, metrics, seed=lambda: registry.seed)
    leases, workers = Leases(client, router_id), FleetWorkers(fleet)
    desk = LoadDesk(leases, workers, router_id=router_id)
    placing = DispatchSettings(
        WaitLimits(settings.model_wait_s, settings.max_waiting_per_model),
        RingSettings(settings.load_factor, settings.num_virtual_nodes),
        ShedLimits(settings.max_queue_s),
    )
    dispatcher = Dispatcher(
        fleet, desk, tenancy, placing, metrics, sizes=sizes, traces=traces, refresh=registry.refresh
    )
    limits = TemplateLimits(settings.template_max_steps, settings.template_max_chars, settings.template_timeout_s)
    renderer = TemplateRenderer(limits)
    facts = ModelFacts(fleet, dispatcher, dispatcher.times, max_wait_s=settings.model_wait_s, refresh=registry.refresh)
    jobs = JobMaker(fleet, facts, renderer, sizes, metrics)
    return _Parts(
        metrics=metrics,
        gate=gate,
        traces=traces,
        fleet=fleet,
        registry=registry,
        client=client,
        presence=presence,
        quotas=quotas,
        tenancy=tenancy,
        leases=leases,
        workers=workers,
        desk=desk,
        keeper=KeeperLoop(Keeper(), Sight(lambda: fleet.route_map, fleet.news.load), workers, leases, metrics),
        dispatcher=dispatcher,
        renderer=renderer,
        facts=facts,
        jobs=jobs,
        edge=Edge(
            jobs, dispatcher, gate, Counts(metrics), settings.max_body_bytes, tenancy.caller, tenancy.rate_headers
        ),
    )


def _more_pages(parts: _Parts, settings: Settings, repository: OipRepository, store: RecordStore | None) -> list[Route]:
    """Those beside models, health and metrics."""
    tenancy, fleet = parts.tenancy, parts.fleet
    requests = RequestPages(parts.traces, parts.jobs, parts.dispatcher, tenancy.caller_by, settings.max_body_bytes)
    return [
        *OpenApiPage().routes(),
        *requests.routes(),
        *PlacementPages(parts.keeper, lambda: fleet.route_map, tenancy.caller_by).routes(),
        *OipPages(repository, tenancy.caller_by).routes(),
        *ResponsePages(store, tenancy.caller_by).routes(),
    ]


def _batch_endpoints(edge: Edge, store: RecordStore | None) -> dict[str, Endpoint]:
    """What lines of a batch may call."""
    return {
        "/v1/chat/completions": ChatEndpoint(edge),
        "/v1/completions": CompletionEndpoint(edge),
        "/v1/embeddings": EmbeddingEndpoint(edge),
        "/v1/responses": ResponsesEndpoint(edge, store),
    }


def _chat_endpoints(edge: Edge, store: RecordStore | None) -> dict[bytes, Endpoint]:
    """Of the chat APIs beside chat completions."""
    return {
        b"/v1/responses": ResponsesEndpoint(edge, store),
        b"/v1/responses/input_tokens": InputTokensEndpoint(edge, store),
        b"/v1/messages": MessagesEndpoint(edge),
        b"/v1/messages/count_tokens": CountTokensEndpoint(edge),
    }


def _pooling_endpoints(edge: Edge) -> dict[bytes, Endpoint]:
    return {
        b"/v1/embeddings": EmbeddingEndpoint(edge),
        b"/v1/rerank": RerankEndpoint(edge),
        b"/rerank": RerankEndpoint(edge),
        b"/v2/rerank": RerankEndpoint(edge, returns_documents=False),
        b"/v1/score": ScoreEndpoint(edge),
        b"/score": ScoreEndpoint(edge),
        b"/tokenize": TokenizeEndpoint(edge),
        b"/detokenize": DetokenizeEndpoint(edge),
    }


def _address(settings: Settings) -> str:
    """At which others reach the HTTP server; empty: not known."""
    port = settings.process_port or (0 if settings.share_ports else settings.http_port)
    if settings.advertise_address or settings.host in _WILDCARDS or not port:
        return settings.advertise_address
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{host}:{port}"
