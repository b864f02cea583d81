"""The operator's numbers for Prometheus about its work with the API server. No global registry.

Counted by the adapters, read by the health server.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from naru_operator.adapters.kube.kinds import WATCHED
from naru_operator.adapters.kube.store import ObjectStore


class OperatorMetrics:
    """All series of one operator; other parts add theirs to `registry`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "naru_operator_api_requests",
            "Requests to the API server, by verb, kind and HTTP status; 0: no answer.",
            ("verb", "kind", "status"),
            registry=self.registry,
        )
        self._is_leader = Gauge(
            "naru_operator_is_leader",
            "1 while this replica acts.",
            registry=self.registry,
        )
        self._silent_seconds = Gauge(
            "naru_operator_seconds_since_heard",
            "Since the last event or list of a kind; never much more than the setting resync_s.",
            ("kind",),
            registry=self.registry,
        )
        self._objects = Gauge(
            "naru_operator_objects",
            "Objects of a kind in memory.",
            ("kind",),
            registry=self.registry,
        )

    def answered(self, verb: str, kind: str, status: int) -> None:
        """The API server answered, or did not (0). Safe in any thread."""
        self._requests.labels(verb, kind, str(status)).inc()

    def follow(self, store: ObjectStore, is_leader: Callable[[], bool]) -> None:
        """Reads gauges from the store and the election whenever somebody asks."""
        self._is_leader.set_function(lambda: float(is_leader()))
        for kind in WATCHED:
            self._silent_seconds.labels(kind.name).set_function(_silent(store, kind.name))
            self._objects.labels(kind.name).set_function(_count(store, kind.name))

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        return generate_latest(self.registry)


def _silent(store: ObjectStore, kind: str) -> Callable[[], float]:
    return lambda: store.silent_s(kind)


def _count(store: ObjectStore, kind: str) -> Callable[[], float]:
    return lambda: float(len(store.objects(kind)))
