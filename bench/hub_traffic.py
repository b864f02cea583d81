"""Many models cycling through a budget for few: Zipf requests from closed-loop clients against one worker.

Called by `hub`. Every answer is compared with the model's first one, token by token and by log probability, so that
weights or caches of another model cannot go unnoticed. The memory is watched from beside by `hub_memory`.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from bench.hub_memory import MemoryTally, MemoryWatch, high_water_mark
from bench.hub_models import ModelCopy
from bench.hub_worker import CALL_TIMEOUT_S, PROMPT, HubWorker, HubWorkerError, generate_request, rpc_words
from bench.hub_workload import best_hit_ratio, lru_hit_ratio, zipf_sequence
from bench.stats import percentile

from naru_proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc

PROGRESS_S = 10.0
LOGPROB_TOLERANCE = 1e-4
"""Answers of one model are equal to the last bit; those of two copies differ by a hundredth and more."""
MAX_SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """What is asked for."""

    num_requests: int
    num_clients: int
    max_tokens: int
    exponent: float
    seed: int
    num_resident: int
    """Models the budget was made for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def matches(self, other: Answer) -> bool:
        """Whether both come from the same weights."""
        return self.token_ids == other.token_ids and all(
            abs(mine - theirs) <= LOGPROB_TOLERANCE for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


@dataclass(slots=True)
class Outcome:
    """What the clients saw, filled while they run."""

    max_tokens: int
    answers: dict[str, Answer] = field(default_factory=dict)
    """The first one of each model."""
    num_done: int = 0
    num_mismatches: int = 0
    first_token_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    failures: collections.Counter[str] = field(default_factory=collections.Counter)

    def add_answer(self, model: str, answer: Answer, first_s: float, request_s: float) -> None:
        """A request that ended well; an answer of the wrong length counts as failed."""
        self.num_done += 1
        if not len(answer.token_ids) == len(answer.logprobs) == self.max_tokens:
            self.failures[f"{len(answer.token_ids)} tokens came, {self.max_tokens} were asked for"] += 1
            return
        self.first_token_s.append(first_s)
        self.request_s.append(request_s)
        self.num_mismatches += not self.answers.setdefault(model, answer).matches(answer)

    def add_failure(self, why: str) -> None:
        """A request that ended with an error, or not at all."""
        self.num_done += 1
        self.failures[why] += 1

    def num_distinct(self) -> int:
        """Models whose first answer is nobody else's: of these a mix-up would have been seen."""
        counts = collections.Counter(self.answers.values())
        return sum(count == 1 for count in counts.values())


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """The run."""

    budget_violations: int
    failed_requests: int
    failures: dict[str, int]
    """How often each kind of failure was seen."""
    answer_mismatches: int
    models_answered: int
    models_told_apart: int
    """Of these, such whose answer is like no other model's."""
    wall_s: float
    requests_per_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    request_p50_s: float | None
    request_p99_s: float | None
    loads: int
    evictions: int
    failed_loads: int
    hit_ratio: float
    """Requests that started no load."""
    hit_ratio_lru: float
    """Of plain LRU with as many places as the budget was made for, for the same sequence one at a time."""
    hit_ratio_best: float
    """Of a policy that knows the future."""
    high_watermark: float
    low_watermark: float
    rss_peak_bytes: int
    rss_high_water_mark_bytes: int
    """By the kernel: nothing escapes between two samples."""
    rss_over_budget_mb: float
    client_cpu_share: float
    """Of one core: the clients run beside the worker."""
    memory: dict[str, Any]
    """All that `MemoryTally` counted."""


def run_traffic(
    worker: HubWorker,
    tally: MemoryTally,
    models: Sequence[ModelCopy],
    plan: TrafficPlan,
    progress: Callable[[str], None],
) -> TrafficFigures:
    """All requests, on a worker that has just been started.

    Raises:
        HubWorkerError: the worker ended, or its memory could not be watched to the end.
    """
    worker.know(models)
    sequence = zipf_sequence(len(models), plan.num_requests, plan.exponent, plan.seed)
    outcome = Outcome(plan.max_tokens)
    cpu_before_s, started_s = time.process_time(), time.perf_counter()
    with MemoryWatch(worker.pid, worker.address, tally) as watch:
        asyncio.run(_clients(worker, [models[number] for number in sequence], plan, outcome, watch, progress))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_before_s
        last = worker.memory()
        tally.add_books(last)
        high_water_bytes = high_water_mark(worker.pid)
    if watch.failure:
        raise HubWorkerError(watch.failure)
    return _figures(plan, sequence, outcome, tally, last, high_water_bytes, wall_s, cpu_s)


def _figures(
    plan: TrafficPlan,
    sequence: Sequence[int],
    outcome: Outcome,
    tally: MemoryTally,
    last: worker_pb2.MemoryStats,
    high_water_bytes: int,
    wall_s: float,
    cpu_s: float,
) -> TrafficFigures:
    def at(values: Sequence[float], percent: float) -> float | None:
        return percentile(values, percent) if values else None

    return TrafficFigures(
        # what the kernel saw between two samples is one more violation, if no sample saw one
        budget_violations=tally.num_violations or int(high_water_bytes > tally.rss_limit_bytes),
        failed_requests=outcome.failures.total(),
        failures=dict(outcome.failures.most_common(MAX_SHOWN_FAILURES)),
        answer_mismatches=outcome.num_mismatches,
        models_answered=len(outcome.answers),
        models_told_apart=outcome.num_distinct(),
        wall_s=wall_s,
        requests_per_s=outcome.num_done / wall_s,
        first_token_p50_s=at(outcome.first_token_s, 50),
        first_token_p99_s=at(outcome.first_token_s, 99),
        request_p50_s=at(outcome.request_s, 50),
        request_p99_s=at(outcome.request_s, 99),
        loads=last.num_loads,
        evictions=last.num_evictions,
        failed_loads=last.num_failed_loads,
        hit_ratio=1 - last.num_loads / plan.num_requests,
        hit_ratio_lru=lru_hit_ratio(sequence, plan.num_resident),
        hit_ratio_best=best_hit_ratio(sequence, plan.num_resident),
        high_watermark=last.high_watermark,
        low_watermark=last.low_watermark,
        rss_peak_bytes=tally.rss_peak_bytes,
        rss_high_water_mark_bytes=high_water_bytes,
        rss_over_budget_mb=tally.rss_over_budget_mb,
        client_cpu_share=cpu_s / wall_s,
        memory=tally.as_dict(),
    )


async def _clients(
    worker: HubWorker,
    asked: Sequence[ModelCopy],
    plan: TrafficPlan,
    outcome: Outcome,
    watch: MemoryWatch,
    progress: Callable[[str], None],
) -> None:
    """Each client sends its next request when its last one has ended."""
    numbered = iter(enumerate(asked))
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        clients = [asyncio.create_task(_client(stub, numbered, plan, outcome)) for _ in range(plan.num_clients)]
        try:
            started_s = time.perf_counter()
            while pending := [client for client in clients if not client.done()]:
                await asyncio.wait(pending, timeout=PROGRESS_S)
                progress(_progress_text(outcome, watch, plan, time.perf_counter() - started_s))
                worker.check_alive()
            for client in clients:
                client.result()
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def _client(stub: Any, numbered: Iterator[tuple[int, ModelCopy]], plan: TrafficPlan, outcome: Outcome) -> None:
    for number, model in numbered:
        request = generate_request(f"r{number}", model.name, PROMPT, plan.max_tokens, with_logprobs=True)
        try:
            await _ask(stub, request, outcome)
        except grpc.RpcError as exc:
            outcome.add_failure(rpc_words(exc))


async def _ask(stub: Any, request: worker_pb2.GenerateRequest, outcome: Outcome) -> None:
    """One request to its end. Raises grpc.RpcError."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    first_s, finish = 0.0, inference_pb2.FINISH_REASON_UNSPECIFIED
    started_s = time.perf_counter()
    async for delta in stub.Generate(request, timeout=CALL_TIMEOUT_S):
        if delta.error.code:
            outcome.add_failure(f"{delta.error.code}: {delta.error.message}")
            return
        if delta.num_tokens and not token_ids:
            first_s = time.perf_counter() - started_s
        token_ids += delta.token_ids
        logprobs += [position.chosen.logprob for position in delta.logprobs]
        finish = delta.finish_reason or finish
    if finish != inference_pb2.FINISH_REASON_LENGTH:
        outcome.add_failure(f"the answer ended with {inference_pb2.FinishReason.Name(finish)}")
        return
    answer = Answer(tuple(token_ids), tuple(logprobs))
    outcome.add_answer(request.model, answer, first_s, time.perf_counter() - started_s)


def _progress_text(outcome: Outcome, watch: MemoryWatch, plan: TrafficPlan, elapsed_s: float) -> str:
    rate = outcome.num_done / elapsed_s
    left = f"{(plan.num_requests - outcome.num_done) / rate / 60:.1f} min left" if rate else "none answered yet"
    loads = watch.last.num_loads if watch.last is not None else 0
    return (
        f"{outcome.num_done}/{plan.num_requests} requests, {rate:.1f}/s, {left}; {loads} loads, "
        f"{outcome.failures.total()} failed, {outcome.num_mismatches} wrong, "
        f"{watch.tally.num_violations} violations, RSS peak {watch.tally.rss_peak_bytes / 1e9:.2f} "
        f"of {watch.tally.rss_limit_bytes / 1e9:.2f} GB"
    )
