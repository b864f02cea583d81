"""The router's numbers for Prometheus. Written by the adapters, printed at /metrics. No global registry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_TOKENS = (0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All series of one router."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._writers: list[Callable[[], None]] = []
        self._make_requests()
        self._make_tokens()
        self._make_workers()
        self._make_shared()

    def _make_requests(self) -> None:
        """What clients ask, and what becomes of it."""
        self.requests = Counter(
            "naru_router_requests",
            "Requests answered, by endpoint, model and HTTP or gRPC status.",
            ("endpoint", "model", "status"),
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "naru_router_request_duration_seconds",
            "From the request's arrival to its last byte.",
            ("endpoint", "model"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.ttft_seconds = Histogram(
            "naru_router_time_to_first_token_seconds",
            "From the request's arrival to the first byte of a stream.",
            ("endpoint", "model"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.waiting = Gauge(
            "naru_router_requests_waiting",
            "Requests of this router that wait for a model to be loaded.",
            ("model",),
            registry=self._registry,
        )
        self.refused = Counter(
            "naru_router_requests_refused",
            "Requests refused before they were sent to a worker, by model and reason: overload or quota.",
            ("model", "reason"),
            registry=self._registry,
        )
        self.template_failures = Counter(
            "naru_router_template_failures",
            "Chats whose template could not be rendered.",
            ("model",),
            registry=self._registry,
        )
        self.fallbacks = Counter(
            "naru_router_fallbacks",
            "Requests that another model answered, as the one asked for could not be served.",
            ("model",),
            registry=self._registry,
        )
        self.unauthenticated = Counter(
            "naru_router_unauthenticated_requests",
            "Requests refused as they had no API key, or none that is known.",
            registry=self._registry,
        )

    def _make_tokens(self) -> None:
        """What prompts cost."""
        self.prompt_tokens = Counter(
            "naru_router_prompt_tokens",
            "Prompt tokens of answered requests.",
            ("model",),
            registry=self._registry,
        )
        self.cached_tokens = Counter(
            "naru_router_cached_tokens",
            "Of these, those that the worker had in its prefix cache.",
            ("model",),
            registry=self._registry,
        )
        self.cached_tokens_error = Histogram(
            "naru_router_cached_tokens_error",
            "How far the cached tokens that a request met were from those expected, in tokens.",
            ("model",),
            buckets=_TOKENS,
            registry=self._registry,
        )

    def _make_workers(self) -> None:
        """Workers, and attempts on them."""
        self.in_flight = Gauge(
            "naru_router_requests_in_flight",
            "Requests this router has open on a worker.",
            ("worker",),
            registry=self._registry,
        )
        self.others_in_flight = Gauge(
            "naru_router_others_in_flight",
            "Requests of other routers on a worker, as the worker last told.",
            ("worker",),
            registry=self._registry,
        )
        self.worker_up = Gauge(
            "naru_router_worker_up",
            "1 while the stream to a worker stands.",
            ("worker",),
            registry=self._registry,
        )
        self.circuits_opened = Counter(
            "naru_router_circuits_opened",
            "Times that a worker was left alone for a while, as it failed or was far slower than others.",
            ("worker",),
            registry=self._registry,
        )
        self.bound_skips = Counter(
            "naru_router_routing_skipped_workers",
            "Workers passed over as they were at their bounded load.",
            registry=self._registry,
        )
        self.retries = Counter(
            "naru_router_retries",
            "Attempts made again on another worker, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self.continuations = Counter(
            "naru_router_continued_requests",
            "Answers that another worker went on with where the first one was lost.",
            registry=self._registry,
        )
        self.stream_losses = Counter(
            "naru_router_worker_stream_losses",
            "Streams to workers that broke.",
            registry=self._registry,
        )
        self.damaged_news = Counter(
            "naru_router_damaged_worker_news",
            "Parts of what workers told of load and route keys that could not be taken.",
            registry=self._registry,
        )
        self.route_keys = Gauge(
            "naru_router_route_keys",
            "Route keys of workers' prefix caches that this router knows.",
            registry=self._registry,
        )
        self.dropped_route_keys = Counter(
            "naru_router_dropped_route_keys",
            "Route keys that were forgotten to hold the index within its bound.",
            registry=self._registry,
        )

    def _make_shared(self) -> None:
        """What routers share, and what of it can be had now."""
        self.slow_clients = Counter(
            "naru_router_slow_clients_disconnected",
            "Clients that were disconnected as they did not take their answers.",
            registry=self._registry,
        )
        self.registry_up = Gauge(
            "naru_router_registry_up",
            "1 while the route map can be read from Redis; 0 means the last map is in use.",
            registry=self._registry,
        )
        self.registry_age = Gauge(
            "naru_router_registry_age_seconds",
            "Seconds since the route map was last read whole, or since the start where it never was.",
            registry=self._registry,
        )
        self.registry_failures = Counter(
            "naru_router_registry_read_failures",
            "Readings of the route map that failed.",
            registry=self._registry,
        )
        self.tenants_file_up = Gauge(
            "naru_router_tenants_file_up",
            "1 while the tenants file is in use as it stands; 0: it is broken, and the last good one is in use.",
            registry=self._registry,
        )
        self.quota_refusals = Counter(
            "naru_router_quota_refusals",
            "Requests refused by a quota, by tenant and quota.",
            ("tenant", "quota"),
            registry=self._registry,
        )
        self.quota_up = Gauge(
            "naru_router_quota_up",
            "1 while quotas are shared out over all routers; 0 means that each router gives out an equal part.",
            registry=self._registry,
        )
        self.routers = Gauge(
            "naru_router_routers",
            "Living routers of this installation, as last seen.",
            registry=self._registry,
        )
        self.is_keeper = Gauge(
            "naru_router_is_keeper",
            "1 while this router is the one that moves copies of models.",
            registry=self._registry,
        )
        self.keeper_moves = Counter(
            "naru_router_keeper_moves",
            "Copies of models that this router wanted moved, by direction (up or down), reason and outcome.",
            ("direction", "reason", "outcome"),
            registry=self._registry,
        )

    def set_keeper(self, is_keeper: bool) -> None:
        """Whether this router is the keeper."""
        self.is_keeper.set(is_keeper)

    def count_move(self, direction: str, reason: str, outcome: str) -> None:
        """Counts a move of the keeper's; see keeper_moves."""
        self.keeper_moves.labels(direction, reason, outcome).inc()

    def forget_worker(self, worker_id: str) -> None:
        """Drops the gauges of a worker that is gone, so that labels do not pile up."""
        for series in (self.in_flight, self.others_in_flight, self.worker_up, self.circuits_opened):
            with contextlib.suppress(KeyError):  # not every worker had each
                series.remove(worker_id)

    def write_before_reading(self, write: Callable[[], None]) -> None:
        """`write` is called before each reading, to count what was put aside: series are dear to write one by one."""
        self._writers.append(write)

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        for write in self._writers:
            write()
        return generate_latest(self._registry)
