"""Counts of the HTTP edge for Prometheus. Each series is looked up once: finding it costs more than counting.

Labels are endpoints, models that were found, and statuses, so that there are few of them.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from naru_router.adapters.metrics import Metrics

MAX_SERIES = 10_000
"""Models come and go; then all are looked up anew."""


class Counts:
    """Writes the router's numbers of requests and their times."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._first: dict[tuple[str, str], Histogram] = {}

    def request(self, endpoint: str, model: str, status: str, seconds: float) -> None:
        """A request has ended."""
        series = self._ended.get((endpoint, model, status))
        if series is None:
            if len(self._ended) >= MAX_SERIES:
                self._ended.clear()
            metrics = self._metrics
            series = metrics.requests.labels(endpoint, model, status), metrics.request_seconds.labels(endpoint, model)
            self._ended[endpoint, model, status] = series
        series[0].inc()
        series[1].observe(seconds)

    def first_byte(self, endpoint: str, model: str, seconds: float) -> None:
        """A stream begins."""
        series = self._first.get((endpoint, model))
        if series is None:
            if len(self._first) >= MAX_SERIES:
                self._first.clear()
            series = self._first[endpoint, model] = self._metrics.ttft_seconds.labels(endpoint, model)
        series.observe(seconds)
