"""What only Naru is asked: how fast a worker starts, what it takes beside weights and KV, how much KV it wastes.

Starts one worker process, without router or Redis, and speaks gRPC to it. Called by `engine`.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from bench.machine import usage_of
from bench.servers import end_tree, free_port
from bench.stats import median

from naru_proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from naru_worker.native.isa import FORCE_VARIABLE

MODEL = "bench"
START_TIMEOUT_S = 60.0
KV_CACHE_BYTES = 256 * 2**20
"""Small enough that the mixed load writes every block of it: a page never touched is not in the RSS."""
NUM_MIXED = 96
MAX_IN_FLIGHT = 32
SAMPLE_S = 0.02


class WorkerError(Exception):
    """The worker did not start, or failed a request."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Naru alone."""

    start_to_first_token_s: float
    """Median over starts: from the start of the process, over loading from disk, to the first token at the client."""
    start_to_first_token_max_s: float
    start_to_ready_s: float
    """Median: the same until the model is loaded."""
    kv_waste: float
    """Slots of used blocks that hold no token, averaged over used blocks and time under mixed lengths."""
    memory_overhead_mb: float
    """Largest RSS under that load, less weights and KV budget, in 10**6 bytes."""
    rss_peak_mb: float
    weights_mb: float
    kv_budget_mb: float
    num_samples: int


def measure_worker(
    model_path: Path, words: Sequence[str], num_starts: int, log_path: Path, isa: str = ""
) -> WorkerFigures:
    """Starts the worker `num_starts` times (at least once); the last one gets the mixed load.

    `isa`, where given, is the instruction set it keeps to.

    Raises:
        WorkerError: no start, no load, no answer.
    """
    starts: list[tuple[float, float]] = []
    for index in range(num_starts):
        port = free_port()
        started_s = time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "naru_worker", "--listen", f"127.0.0.1:{port}", "--metrics-listen", "off"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **({FORCE_VARIABLE: isa} if isa else {})},
            )
        try:
            _wait_for_port(process, port, started_s + START_TIMEOUT_S, log_path)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                worker = worker_pb2_grpc.WorkerStub(channel)
                starts.append(_first_token(worker, model_path, started_s))
                if index == num_starts - 1:
                    return _under_load(worker, process.pid, words, starts)
        except grpc.RpcError as exc:
            raise WorkerError(f"the worker answered {exc.code().name}: {exc.details()}") from exc
        finally:
            end_tree(process)
    raise WorkerError(f"num_starts is {num_starts!r}, expected at least 1")


def kv_waste(samples: Sequence[tuple[int, float]]) -> float | None:
    """Mean of (used blocks, wasted share of their slots), each weighted by its blocks; None when none were used."""
    used = sum(blocks for blocks, _ in samples)
    return sum(blocks * share for blocks, share in samples) / used if used else None


def _wait_for_port(process: subprocess.Popen[bytes], port: int, deadline_s: float, log_path: Path) -> None:
    while process.poll() is None and time.monotonic() < deadline_s:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.002)
    tail = "\n    ".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    raise WorkerError(f"the worker does not listen (exit code {process.poll()}); the end of its log:\n    {tail}")


def _first_token(worker: worker_pb2_grpc.WorkerStub, model_path: Path, started_s: float) -> tuple[float, float]:
    """(seconds to ready, seconds to the first token) since `started_s`."""
    options = worker_pb2.EngineOptions(kv_cache_bytes=KV_CACHE_BYTES)
    load = worker_pb2.LoadRequest(model=MODEL, uri=model_path.as_uri(), generation=1, options=options)
    state = worker_pb2.MODEL_STATE_UNSPECIFIED
    for progress in worker.Load(load, timeout=START_TIMEOUT_S):
        state = progress.state
        if progress.error.code:
            raise WorkerError(f"the model was not loaded: {progress.error.message}")
    if state != worker_pb2.MODEL_STATE_READY:
        raise WorkerError(f"loading ended in {worker_pb2.ModelState.Name(state)}")
    ready_s = time.monotonic() - started_s
    for delta in worker.Generate(_request("first", "The capital of France is", 1), timeout=START_TIMEOUT_S):
        _check(delta)
        if delta.num_tokens:
            return ready_s, time.monotonic() - started_s
    raise WorkerError("the worker ended the first request without a token")


def _under_load(
    worker: worker_pb2_grpc.WorkerStub, pid: int, words: Sequence[str], starts: Sequence[tuple[float, float]]
) -> WorkerFigures:
    rng = random.Random("mixed lengths")
    pending = [
        _request(f"mixed-{i}", " ".join(rng.choices(words, k=rng.randint(32, 768))), rng.randint(16, 128))
        for i in range(NUM_MIXED)
    ]
    pending.reverse()
    threads = [_Requester(worker, pending) for _ in range(MAX_IN_FLIGHT)]
    for thread in threads:
        thread.start()
    samples: list[tuple[int, float]] = []
    rss_peak = 0
    while any(thread.is_alive() for thread in threads):
        stats = worker.Stats(worker_pb2.StatsRequest(), timeout=START_TIMEOUT_S).models[0]
        samples.append((stats.num_blocks - stats.num_free_blocks, stats.kv_waste_ratio))
        rss_peak = max(rss_peak, usage_of(pid).rss_bytes)
        threads[0].join(SAMPLE_S)
        if not threads[0].is_alive():
            time.sleep(SAMPLE_S)
    failures = [thread.failure for thread in threads if thread.failure]
    if failures:
        raise WorkerError(failures[0])
    waste = kv_waste(samples)
    if waste is None:
        raise WorkerError("the worker reported no used KV block under load")
    model = worker.Describe(worker_pb2.DescribeRequest(), timeout=START_TIMEOUT_S).models[0]
    return WorkerFigures(
        start_to_first_token_s=median([first for _, first in starts]),
        start_to_first_token_max_s=max(first for _, first in starts),
        start_to_ready_s=median([ready for ready, _ in starts]),
        kv_waste=waste,
        memory_overhead_mb=(rss_peak - model.weight_bytes - model.kv_bytes) / 1e6,
        rss_peak_mb=rss_peak / 1e6,
        weights_mb=model.weight_bytes / 1e6,
        kv_budget_mb=model.kv_bytes / 1e6,
        num_samples=len(samples),
    )


class _Requester(threading.Thread):
    """Takes requests off the shared list until none is left; keeps its first failure."""

    def __init__(self, worker: worker_pb2_grpc.WorkerStub, pending: list[worker_pb2.GenerateRequest]) -> None:
        super().__init__(daemon=True)
        self.failure = ""
        self._worker = worker
        self._pending = pending

    def run(self) -> None:
        try:
            while self._pending:
                for delta in self._worker.Generate(self._pending.pop(), timeout=600):
                    _check(delta)
        except IndexError:
            return  # another thread took the last one
        except (grpc.RpcError, WorkerError) as exc:
            self.failure = f"a request of the mixed load failed: {exc}"


def _request(request_id: str, prompt: str, max_tokens: int) -> worker_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return worker_pb2.GenerateRequest(request_id=request_id, model=MODEL, text=prompt, sampling=sampling)


def _check(delta: worker_pb2.Delta) -> None:
    if delta.error.code:
        raise WorkerError(f"request {delta.request_id} failed: {delta.error.message}")
