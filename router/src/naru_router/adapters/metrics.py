"""The router's numbers for Prometheus. Written by the adapters, printed at /metrics. No global registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All series of one router."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
        self.in_flight = Gauge(
            "naru_router_requests_in_flight",
            "Requests this router has open on a worker.",
            ("worker",),
            registry=self._registry,
        )
        self.worker_up = Gauge(
            "naru_router_worker_up",
            "1 while the stream to a worker stands.",
            ("worker",),
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
        self.bound_skips = Counter(
            "naru_router_routing_skipped_workers",
            "Workers passed over as they were at their bounded load.",
            registry=self._registry,
        )
        self.stream_losses = Counter(
            "naru_router_worker_stream_losses",
            "Streams to workers that broke.",
            registry=self._registry,
        )
        self.registry_up = Gauge(
            "naru_router_registry_up",
            "1 while the route map can be read from Redis; 0 means the last map is in use.",
            registry=self._registry,
        )
        self.registry_failures = Counter(
            "naru_router_registry_read_failures",
            "Readings of the route map that failed.",
            registry=self._registry,
        )
        self.template_failures = Counter(
            "naru_router_template_failures",
            "Chats whose template could not be rendered.",
            ("model",),
            registry=self._registry,
        )

    def forget_worker(self, worker_id: str) -> None:
        """Drops the gauges of a worker that is gone, so that labels do not pile up."""
        for gauge in (self.in_flight, self.worker_up):
            gauge.remove(worker_id)

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        return generate_latest(self._registry)
