"""An engine over a runner that computes, for tests that need no server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.token_table import TokenTable, Vocabulary
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import PriorOutput, Request, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.scheduler_config import SchedulerConfig

_arrivals = itertools.count()


def engine_over(
    runner: Runner,
    vocabulary: Vocabulary,
    vocab_limit: int,
    eos_token_ids: tuple[int, ...],
    *,
    num_blocks: int | None = None,
    max_num_batched_tokens: int = 256,
    max_num_seqs: int = 32,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    max_draft_tokens: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ModelEngine, Scheduler]:
    """An engine, and its scheduler. `num_blocks`: of those that the runner has."""
    kv = runner.kv
    num_blocks = num_blocks or kv.num_blocks
    options = RunnerOptions(kv.block_size, num_blocks, max_num_batched_tokens, max_num_seqs, max_model_len)
    limits = SchedulerConfig(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        eos_token_ids,
        vocab_size=vocab_limit,
        max_draft_tokens=max_draft_tokens,
    )
    blocks = KVManager(num_blocks, kv.block_size, model_revision="r", enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(limits, blocks)
    return ModelEngine(scheduler, runner, options, TokenTable(vocabulary), vocab_limit, clock), scheduler


def request_of(prompt: list[int], name: str = "a", *, prior: tuple[PriorOutput, ...] = (), **params: Any) -> Request:
    """A request for these parameters."""
    arrival = next(_arrivals)
    sampling = SamplingParams(**params)
    return Request(RequestId(name), tuple(prompt), sampling, seed=arrival, arrival=arrival, prior=prior)


def run_all(engine: ModelEngine, scheduler: Scheduler, requests: list[Request]) -> list[SequenceDelta]:
    """Runs requests to their ends, all invariants checked after each step; every block must be back."""
    outbox: list[SequenceDelta] = []
    for each in requests:
        engine.submit(each, 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
        scheduler.check()
    assert engine.kv_stats().num_used_blocks == 0
    return outbox


def choices_of(deltas: list[SequenceDelta], name: str = "a") -> list[tuple[int, ...]]:
    """Output ids of each choice of a request."""
    found: dict[int, tuple[int, ...]] = {}
    for delta in deltas:
        if delta.request_id == name:
            assert delta.error is None, delta.error
            found[delta.index] = found.get(delta.index, ()) + delta.token_ids
    return [found[index] for index in sorted(found)]
