"""The Prometheus endpoint: numbers of all models at the time of the scrape, in a thread of its own.

Names are those of vLLM's metrics with our prefix. Labels are the model and words of ours, and only models in memory
appear, so that no request can make a series. Nothing is pushed: an idle engine reads zero at once.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from naru_worker.adapters.engine.stats import EngineStats, Histogram
from naru_worker.adapters.ops.device_stats import DeviceStats
from naru_worker.core.kv_stats import KVStats

SCRAPE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ModelSample:
    """One model at the time of a scrape."""

    model: str
    stats: EngineStats
    kv: KVStats | None
    """None: the engine was too busy to say."""
    device: DeviceStats | None = None
    """None: it has no device of its own."""
    steps_ahead: Mapping[str, int] = field(default_factory=dict)
    """Steps by whether the next one was launched before their tokens were known, or why not; empty where none is."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A worker's GPU at the time of a scrape."""

    pool_bytes: dict[str, int]
    """Of the memory that is mapped on demand: held by models, and idle; both 0 where it is not."""
    pinned_slots: dict[str, int]
    """Of the host, for weights that wait: taken, and free."""
    sleeping_bytes: int
    """Of the slots that are taken."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """The worker at the time of a scrape."""

    models: list[ModelSample]
    rss_bytes: int
    is_serving: bool
    memory_bytes: dict[str, int]
    """Of the budget, by kind: weights, kv, workspace, private, asleep, unreturned; and host, which has a budget of its
    own."""
    budget_bytes: int
    num_known_models: int
    num_loads: int
    num_evictions: int
    num_failed_loads: int
    gpu: GpuSample | None = None
    """None: it has none."""


_GAUGES: tuple[tuple[str, str, Callable[[ModelSample], float]], ...] = (
    ("num_requests_running", "Sequences that are being computed", lambda s: s.stats.num_running),
    ("num_requests_waiting", "Sequences that wait for their turn", lambda s: s.stats.num_waiting),
    ("kv_cache_usage_ratio", "Used KV blocks per block there may ever be", lambda s: s.stats.kv_usage_ratio),
    (
        "kv_waste_ratio",
        "Slots of used KV blocks without a token, per slot",
        lambda s: s.kv.waste_ratio if s.kv else 0.0,
    ),
    ("kv_cached_blocks", "Free KV blocks that still hold a prefix", lambda s: s.kv.num_cached_blocks if s.kv else 0),
    ("kv_blocks", "Most KV blocks the model may have", lambda s: s.stats.num_blocks),
    ("kv_committed_bytes", "Bytes of KV in memory now", lambda s: s.stats.kv_committed_bytes),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ModelSample], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.stats.prefix_query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.stats.prefix_hit_tokens),
    ("num_preemptions", "Sequences that lost their KV blocks", lambda s: s.stats.num_preemptions),
    ("prompt_tokens", "Prompt tokens of requests that began", lambda s: s.stats.prompt_tokens),
    ("prefilled_tokens", "Tokens computed in runs: prompts and recomputation", lambda s: s.stats.prefilled_tokens),
    ("generation_tokens", "Tokens drawn", lambda s: s.stats.generated_tokens),
    ("drafted_tokens", "Guessed tokens that were computed", lambda s: s.stats.drafted_tokens),
    ("accepted_draft_tokens", "Guessed tokens that were drawn", lambda s: s.stats.accepted_tokens),
    ("engine_steps", "Steps of the engine", lambda s: s.stats.num_steps),
    ("engine_compute_seconds", "Time of the engine thread given to the model", lambda s: s.stats.compute_s),
    ("kv_grows", "Times the KV cache was granted memory", lambda s: s.stats.num_kv_grows),
    ("kv_shrinks", "Times the KV cache gave memory back", lambda s: s.stats.num_kv_shrinks),
    ("engine_failed_steps", "Steps that failed", lambda s: s.stats.num_failed_steps),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelSample], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token", lambda s: s.stats.ttft_s),
    ("inter_token_latency_seconds", "Between two tokens of one choice", lambda s: s.stats.itl_s),
    ("e2e_request_latency_seconds", "From arrival to the end", lambda s: s.stats.e2e_s),
    ("step_seconds", "One step of the engine", lambda s: s.stats.step_s),
    ("batch_inputs", "Inputs computed in one batch, by models that do not generate", lambda s: s.stats.batch_rows),
    ("batch_wait_seconds", "From an input's arrival at such a model to its batch", lambda s: s.stats.batch_wait_s),
)


class SampleCollector:
    """A collector for the metrics library over samples taken when asked."""

    def __init__(self, sample: Callable[[], WorkerSample]) -> None:
        self._sample = sample

    def collect(self) -> Iterable[Any]:
        """All metric families."""
        from prometheus_client import core

        sample = self._sample()
        yield core.GaugeMetricFamily("naru_worker_rss_bytes", "Memory of the process in RAM", sample.rss_bytes)
        yield core.GaugeMetricFamily("naru_worker_serving", "1 while health says SERVING", int(sample.is_serving))
        yield from _residency(sample)
        for name, text, value in _GAUGES:
            gauge = core.GaugeMetricFamily(f"naru_{name}", text, labels=["model"])
            for model in sample.models:
                gauge.add_metric([model.model], value(model))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = core.CounterMetricFamily(f"naru_{name}", text, labels=["model"])
            for model in sample.models:
                counter.add_metric([model.model], value(model))
            yield counter
        for name, text, histogram_of in _HISTOGRAMS:
            family = core.HistogramMetricFamily(f"naru_{name}", text, labels=["model"])
            for model in sample.models:
                buckets, total = _cumulated(histogram_of(model))
                family.add_metric([model.model], buckets, total)
            yield family
        ends = core.CounterMetricFamily(
            "naru_request_success", "Requests by how they ended", labels=["model", "reason"]
        )
        for model in sample.models:
            for reason, count in sorted(model.stats.finished.items()):
                ends.add_metric([model.model, reason], count)
        yield ends
        steps = core.CounterMetricFamily(
            "naru_decode_steps", "Steps that decode, by why they had guessed tokens or none", labels=["model", "drafts"]
        )
        for model in sample.models:
            for reason, count in model.stats.draft_reasons.items():
                steps.add_metric([model.model, reason], count)
        yield steps
        if sample.gpu is not None:
            yield from _of_gpu(sample.models, sample.gpu)


def _residency(sample: WorkerSample) -> Iterable[Any]:
    from prometheus_client import core

    memory = core.GaugeMetricFamily("naru_worker_memory_bytes", "Booked bytes of models", labels=["kind"])
    for kind, num_bytes in sample.memory_bytes.items():
        memory.add_metric([kind], num_bytes)
    yield memory
    yield core.GaugeMetricFamily("naru_worker_memory_budget_bytes", "Most that may be booked", sample.budget_bytes)
    yield core.GaugeMetricFamily("naru_worker_known_models", "Models that may be asked for", sample.num_known_models)
    yield core.CounterMetricFamily("naru_worker_model_loads", "Loads that succeeded", sample.num_loads)
    yield core.CounterMetricFamily("naru_worker_model_evictions", "Unloads by own decision", sample.num_evictions)
    yield core.CounterMetricFamily("naru_worker_model_load_failures", "Loads that failed", sample.num_failed_loads)


def _of_gpu(models: Iterable[ModelSample], gpu: GpuSample) -> Iterable[Any]:
    from prometheus_client import core

    ahead = core.CounterMetricFamily(
        "naru_steps_ahead", "Steps, by whether the next one was launched before their tokens", labels=["model", "next"]
    )
    steps = core.CounterMetricFamily(
        "naru_gpu_steps", "Steps, by the graph that was replayed or why none was", labels=["model", "graph"]
    )
    graphs = core.GaugeMetricFamily("naru_gpu_graphs", "CUDA graphs there are", labels=["model"])
    num_bytes = core.GaugeMetricFamily("naru_gpu_graph_bytes", "GPU memory that graphs have taken", labels=["model"])
    stopped = core.GaugeMetricFamily("naru_gpu_graphs_stopped", "1 where no more graphs are made", labels=["model"])
    for model in models:
        for reason, count in model.steps_ahead.items():
            ahead.add_metric([model.model, reason], count)
        if model.device is not None:
            for reason, count in model.device.steps.items():
                steps.add_metric([model.model, reason], count)
            graphs.add_metric([model.model], model.device.num_graphs)
            num_bytes.add_metric([model.model], model.device.graph_bytes)
            stopped.add_metric([model.model], int(bool(model.device.graph_failure)))
    yield from (ahead, steps, graphs, num_bytes, stopped)
    for name, text, values in (
        ("naru_worker_gpu_pool_bytes", "GPU memory that is mapped on demand, by state", gpu.pool_bytes),
        ("naru_worker_pinned_slots", "Slots of pinned host memory for weights that wait", gpu.pinned_slots),
    ):
        family = core.GaugeMetricFamily(name, text, labels=["state"])
        for state, value in values.items():
            family.add_metric([state], value)
        yield family
    yield core.GaugeMetricFamily("naru_worker_sleeping_bytes", "Pinned bytes of waiting weights", gpu.sleeping_bytes)


class MetricsServer:
    """``GET /metrics`` on its own threads, so that a busy asyncio thread does not lose a scrape."""

    def __init__(self, host: str, port: int, sample: Callable[[], WorkerSample]) -> None:
        """Binds; raises OSError where the port is taken."""
        collector = SampleCollector(sample)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body, content_type = _render(collector)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Scrapes are not news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._server.timeout = 0
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begins to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; waits for the thread."""
        self._stop.close()
        self._thread.join()
        self._stopped.close()
        self._server.server_close()

    def _serve(self) -> None:
        """Sleeps until a scrape comes or the end: the library's own loop looks several times a second."""
        with selectors.DefaultSelector() as selector:
            for source in (self._server, self._stopped):
                selector.register(source, selectors.EVENT_READ)
            while all(key.fileobj is self._server for key, _ in selector.select()):
                self._server.handle_request()


def ask_loop(loop: asyncio.AbstractEventLoop, ask: Callable[[], Any]) -> Callable[[], Any]:
    """A function for other threads that runs the coroutine function `ask` in the asyncio thread and waits for it."""

    def call() -> Any:
        return asyncio.run_coroutine_threadsafe(ask(), loop).result(SCRAPE_TIMEOUT_S)

    return call


def _render(collector: SampleCollector) -> tuple[bytes, str]:
    """Text exposition. The library is imported at the first scrape: it would cost a tenth of the start."""
    from prometheus_client import CollectorRegistry, exposition

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return exposition.generate_latest(registry), exposition.CONTENT_TYPE_LATEST


def _cumulated(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), tuple(histogram.counts), strict=True):
        running += count
        buckets.append((bound, running))
    return buckets, histogram.total
