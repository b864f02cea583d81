"""Do loads of other models disturb a running stream? Gaps between tokens of two resident models, with and without them.

Called by `hub`. Rounds of three kinds alternate, so that a slow minute of the machine is in all: no loads; five loads a
second, about as many as the long run has; and loads without a pause, each for a request of one token, whose prompt
takes turns of the engine as well: the worst case, for the record.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from bench.hub_models import ModelCopy
from bench.hub_worker import CALL_TIMEOUT_S, PROMPT, HubWorker, HubWorkerError, generate_request, rpc_words
from bench.stats import median, percentile, ratio

from naru_proto.v1 import worker_pb2, worker_pb2_grpc

LOADS_PER_S = 5.0

Kind = Literal["idle", "loads", "requests"]
KINDS: tuple[Kind, ...] = ("idle", "loads", "requests")


@dataclass(frozen=True, slots=True)
class Round:
    """Both streams, once."""

    kind: Kind
    gaps_s: tuple[float, ...]
    """Between tokens of one stream, of both, while both ran."""
    num_loads: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class ItlFigures:
    """Inter-token latency at the client."""

    itl_p99_ratio_during_loads: float | None
    itl_p99_idle_s: float
    """Median over rounds of each round's p99, without loads."""
    itl_p99_loads_s: float
    itl_p99_requests_s: float
    """While each load is for a request, which is computed too."""
    itl_p50_idle_s: float
    itl_p50_loads_s: float
    itl_max_loads_s: float
    loads_per_s: float
    num_loads: int
    num_rounds: int
    """Of each kind."""
    p99_by_round_s: dict[str, tuple[float, ...]]


def measure_itl(
    worker: HubWorker,
    pinned: Sequence[ModelCopy],
    others: Sequence[ModelCopy],
    num_rounds: int,
    num_tokens: int,
    progress: Callable[[str], None],
) -> ItlFigures:
    """`pinned` stream while `others`, whose images exist, come by demand and go.

    Raises:
        HubWorkerError: a load or a request failed.
    """
    worker.know(others)
    for model in others:  # packing is not what is measured
        worker.bring(model, worker_pb2.TIER_HOST)
        worker.send_down(model)
    for model in pinned:
        worker.bring(model, worker_pb2.TIER_ACTIVE, pinned=True)
        worker.first_token_s(model)
    coming = itertools.cycle(others)
    rounds = []
    for number in range(num_rounds):
        rounds += [asyncio.run(_round(worker, pinned, coming, num_tokens, kind)) for kind in KINDS]
        idle_s, loads_s, requests_s = (percentile(r.gaps_s, 99) for r in rounds[-3:])
        progress(
            f"gaps between tokens: round {number + 1}/{num_rounds}, p99 {1000 * idle_s:.1f} ms idle, "
            f"{1000 * loads_s:.1f} ms during {rounds[-2].num_loads} loads, {1000 * requests_s:.1f} ms during "
            f"{rounds[-1].num_loads} loads for a request each"
        )
    return summary(rounds)


def summary(rounds: Sequence[Round]) -> ItlFigures:
    """Figures of rounds of all kinds, at least one of each."""
    of_kind = {kind: [r for r in rounds if r.kind == kind] for kind in KINDS}
    idle, loads = of_kind["idle"], of_kind["loads"]
    p99_s = {str(kind): tuple(percentile(r.gaps_s, 99) for r in of_kind[kind]) for kind in KINDS}
    num_loads = sum(r.num_loads for r in loads)
    return ItlFigures(
        itl_p99_ratio_during_loads=ratio(median(p99_s["loads"]), median(p99_s["idle"])),
        itl_p99_idle_s=median(p99_s["idle"]),
        itl_p99_loads_s=median(p99_s["loads"]),
        itl_p99_requests_s=median(p99_s["requests"]),
        itl_p50_idle_s=median([median(r.gaps_s) for r in idle]),
        itl_p50_loads_s=median([median(r.gaps_s) for r in loads]),
        itl_max_loads_s=max(max(r.gaps_s) for r in loads),
        loads_per_s=num_loads / sum(r.wall_s for r in loads),
        num_loads=num_loads,
        num_rounds=len(loads),
        p99_by_round_s=p99_s,
    )


def gaps_together(arrivals_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Gaps of all streams between the instants when the last one began and the first one ended."""
    begin_s = max(times[0] for times in arrivals_s)
    end_s = min(times[-1] for times in arrivals_s)
    return tuple(
        after - before
        for times in arrivals_s
        for before, after in itertools.pairwise(times)
        if before >= begin_s and after <= end_s
    )


async def _round(
    worker: HubWorker,
    pinned: Sequence[ModelCopy],
    coming: itertools.cycle[ModelCopy],
    num_tokens: int,
    kind: Kind,
) -> Round:
    stop = asyncio.Event()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        started_s = time.perf_counter()
        streams = [asyncio.create_task(_stream(stub, model.name, num_tokens)) for model in pinned]
        loads = None if kind == "idle" else asyncio.create_task(_loads(worker, coming, stop, kind))
        try:
            # when one stream has ended, the other one has the engine for itself
            await asyncio.wait([*streams, *([loads] if loads else [])], return_when=asyncio.FIRST_COMPLETED)
            wall_s = time.perf_counter() - started_s
            stop.set()
            num_loads = 0 if loads is None else await loads
            arrivals_s = [await stream for stream in streams]
        except grpc.RpcError as exc:
            raise HubWorkerError(f"a request failed: {rpc_words(exc)}") from exc
        finally:
            stop.set()
            await asyncio.gather(*streams, *([loads] if loads else []), return_exceptions=True)
    return Round(kind, gaps_together(arrivals_s), num_loads, wall_s)


async def _stream(stub: Any, model: str, num_tokens: int) -> list[float]:
    """When each token arrived."""
    arrivals_s = []
    request = generate_request(f"stream-{model}-{time.monotonic_ns()}", model, PROMPT, num_tokens)
    async for delta in stub.Generate(request, timeout=CALL_TIMEOUT_S):
        if delta.error.code:
            raise HubWorkerError(f"a stream of {model} failed: {delta.error.message}")
        if delta.num_tokens:
            arrivals_s.append(time.perf_counter())
    if len(arrivals_s) < 2:
        raise HubWorkerError(f"a stream of {model} ended after {len(arrivals_s)} tokens")
    return arrivals_s


async def _loads(worker: HubWorker, coming: itertools.cycle[ModelCopy], stop: asyncio.Event, kind: Kind) -> int:
    """One model after another is loaded, by a request of one token or without, and taken down; returns how many."""
    count = 0
    started_s = time.perf_counter()
    while not stop.is_set():
        if kind == "loads" and (early_s := started_s + count / LOADS_PER_S - time.perf_counter()) > 0:
            await asyncio.sleep(early_s)
        model = next(coming)
        if kind == "requests":
            await asyncio.to_thread(worker.first_token_s, model, 1)
        else:
            await asyncio.to_thread(worker.bring, model, worker_pb2.TIER_ACTIVE)
        await asyncio.to_thread(worker.send_down, model)
        count += 1
    return count
