"""The engine with guessed tokens says what it says without them: text, logprobs, penalties, stops and all choices."""

from __future__ import annotations

from typing import Any

import pytest
from toy_model import toy_engine
from toy_runs import Outcome, assert_all_blocks_free, finish, request, run

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.core.request import FinishReason, RequestId

TWO_LETTERS = ((97, 20.0), (98, 20.0))
"""So strong a wish for them that nothing else is said, and texts repeat themselves now and then."""
ONE_LETTER = ((97, 40.0),)


def outcomes(max_draft_tokens: int, asks: dict[str, dict[str, Any]], **limits: Any) -> tuple[dict[str, Outcome], Any]:
    engine, _, scheduler = toy_engine(max_draft_tokens=max_draft_tokens, **limits)
    requests = []
    for number, (name, params) in enumerate(asks.items()):
        prompt = params.get("prompt", "abba abab")
        given = {key: value for key, value in params.items() if key != "prompt"}
        requests.append(request(name, prompt, seed=number, **given))
    found = run(engine, requests)
    scheduler.check()
    assert_all_blocks_free(engine)
    return found, engine


def told(outcome: Outcome) -> Any:
    """All that a client gets, but for how it was cut into pieces."""
    logprobs = {
        index: [each for delta in outcome.deltas if delta.index == index for each in delta.logprobs]
        for index in outcome.texts
    }
    scores = [delta.prompt_logprobs for delta in outcome.deltas if delta.prompt_logprobs]
    return outcome.texts, outcome.ids, outcome.reasons, outcome.usage, logprobs, scores


ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 60},
    "sampled": {"max_tokens": 60, "temperature": 1.0},
    "choices": {"max_tokens": 40, "n": 3, "temperature": 0.8},
    "logprobs": {"max_tokens": 40, "logprobs": 2, "prompt_logprobs": 1},
    "repetition": {"max_tokens": 60, "repetition_penalty": 1.3, "temperature": 1.0},
    "frequency": {"max_tokens": 60, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "new words": {"max_tokens": 30, "frequency_penalty": 1.5, "repetition_penalty": 1.1, "logit_bias": ((98, 12.0),)},
    "stop": {"max_tokens": 60, "stop": ("abab", "bbbbb")},
    "late stop": {"max_tokens": 60, "stop": ("ab",), "min_tokens": 17},
    "stop token": {"max_tokens": 60, "stop_token_ids": (98,), "min_tokens": 25, "temperature": 1.0},
    "one letter": {"max_tokens": 60, "logit_bias": ONE_LETTER},
}


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 45, "max_num_batched_tokens": 24, "max_num_seqs": 8}], ids=str)
def test_everything_told_is_the_same(limits: dict[str, Any]) -> None:
    asks = {name: {"logit_bias": TWO_LETTERS, **params} for name, params in ASKS.items()}
    plain, _ = outcomes(0, asks, **limits)
    guessed, engine = outcomes(6, asks, **limits)
    assert {name: told(each) for name, each in guessed.items()} == {name: told(each) for name, each in plain.items()}
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens
    assert engine.stats.draft_reasons["pays"] > 0
    assert sum(len(delta.token_ids) > 1 for each in guessed.values() for delta in each.deltas) > 5
    if limits:
        assert engine.stats.num_preemptions > 0


def test_nothing_behind_a_stop_string_counts() -> None:
    asks = {"a": {"logit_bias": ONE_LETTER, "prompt": "aaaa", "max_tokens": 90, "stop": ("aaaaaaaaaaaaaaaaaaaaaaa",)}}
    found, engine = outcomes(8, asks)
    assert engine.stats.accepted_tokens > 0
    assert found["a"].reasons == {0: FinishReason.STOP}
    assert found["a"].texts == {0: ""}
    assert found["a"].usage is not None
    assert found["a"].usage.completion_tokens == engine.stats.generated_tokens == 23


def test_a_request_cancelled_among_its_drafts_gives_all_blocks_back() -> None:
    engine, _, scheduler = toy_engine(max_draft_tokens=8)
    outbox: list[SequenceDelta] = []
    engine.submit(request("a", "aaaaaa", logit_bias=ONE_LETTER, max_tokens=200), 0.0, outbox)
    while engine.stats.drafted_tokens < 20:
        engine.step(outbox)
    engine.cancel(RequestId("a"), None, outbox)
    scheduler.check()
    assert finish(engine, outbox)["a"].reasons == {0: FinishReason.CANCELLED}
    assert_all_blocks_free(engine)


def test_costs_are_learned_from_steps_that_only_decode() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    engine, _, scheduler = toy_engine(max_draft_tokens=8, clock=clock)
    assert scheduler.speculation is not None
    run(engine, [request("a", "aaaaaa", logit_bias=ONE_LETTER, max_tokens=60)])
    # By this clock every step takes the same: a row costs next to nothing.
    costs = scheduler.speculation.costs
    assert costs.row_s < 0.02 * costs.step_s(1) < 0.001
