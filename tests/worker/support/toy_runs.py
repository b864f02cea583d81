"""Requests run through toy engines to their ends, and what came of each."""

from __future__ import annotations

import itertools
from typing import Any

from toy_model import toy_engine

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.sampling import SamplingParams

_arrivals = itertools.count()


def request(name: str, prompt: str = "once upon", *, salt: bytes = b"", **params: Any) -> Request:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    sampling = SamplingParams(**given)
    seed = sampling.seed if sampling.seed is not None else 1000 + next(_arrivals)
    return Request(RequestId(name), tuple(prompt.encode()), sampling, seed, next(_arrivals), cache_salt=salt)


class Outcome:
    """What one request got, checked for exactly one end."""

    def __init__(self, deltas: list[SequenceDelta]) -> None:
        lasts = [d for d in deltas if d.is_last]
        assert len(lasts) == 1, f"{len(lasts)} last deltas"
        assert deltas[-1] is lasts[0]
        self.error: NaruError | None = lasts[0].error
        self.usage = lasts[0].usage
        assert (self.error is None) != (self.usage is None)
        self.texts: dict[int, str] = {}
        self.ids: dict[int, tuple[int, ...]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.deltas = deltas
        for delta in deltas:
            assert delta.index not in self.reasons or delta.error is not None, "output after the end of a choice"
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
            self.ids[delta.index] = self.ids.get(delta.index, ()) + delta.token_ids
            if delta.finish_reason is not None:
                self.reasons[delta.index] = delta.finish_reason


def run(engine: ModelEngine, requests: list[Request], max_steps: int = 5000) -> dict[str, Outcome]:
    """Runs requests to their ends."""
    outbox: list[SequenceDelta] = []
    for item in requests:
        engine.submit(item, 0.0, outbox)
    return finish(engine, outbox, max_steps)


def finish(engine: ModelEngine, outbox: list[SequenceDelta], max_steps: int = 5000) -> dict[str, Outcome]:
    for _ in range(max_steps):
        if not engine.has_work:
            break
        engine.step(outbox)
    assert not engine.has_work, "the engine does not come to an end"
    by_request: dict[str, list[SequenceDelta]] = {}
    for delta in outbox:
        by_request.setdefault(delta.request_id, []).append(delta)
    return {name: Outcome(deltas) for name, deltas in by_request.items()}


def solo(item: Request) -> Outcome:
    engine, _, _ = toy_engine()
    fresh = Request(
        item.request_id, item.prompt_token_ids, item.params, item.seed, item.arrival, cache_salt=item.cache_salt
    )
    return run(engine, [fresh])[item.request_id]


def assert_all_blocks_free(engine: ModelEngine) -> None:
    stats = engine.kv_stats()
    assert stats.num_used_blocks == 0
    assert stats.num_free_blocks == stats.num_blocks == engine.stats.num_free_blocks
    assert engine.stats.num_running == engine.stats.num_waiting == 0
