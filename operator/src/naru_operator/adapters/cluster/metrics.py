"""What the control loop counts, for Prometheus. Registered by the app; read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from naru_operator.adapters.cluster.controller import ClusterController

Metric = CounterMetricFamily | GaugeMetricFamily


class LoopMetrics(Collector):
    """The series of one control loop."""

    def __init__(self, controller: ClusterController) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Reads them now."""
        turns = self._controller.turns
        yield _counter("naru_operator_turns", "Full turns of the control loop.", turns.num_turns)
        yield _counter("naru_operator_turn_failures", "Turns that failed and were tried again.", turns.num_failures)
        yield _gauge("naru_operator_last_turn_seconds", "Time the last full turn took.", turns.last_s)
        silent_s = self._controller.stalled_s()
        yield _gauge("naru_operator_loop_silence_seconds", "Time since the control loop last looked.", silent_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    metric = GaugeMetricFamily(name, text)
    metric.add_metric((), value)
    return metric


def _counter(name: str, text: str, value: float) -> Metric:
    metric = CounterMetricFamily(name, text)
    metric.add_metric((), value)
    return metric
