"""The engine one step ahead of its device says what the plain loop says, and when it cannot be ahead it says why."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching_toy import LaunchingToy
from toy_grammars import structured, wish_of
from toy_model import toy_engine
from toy_runs import Outcome, assert_all_blocks_free, finish, request, run

from naru_proto.errors import Unavailable
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.steps_ahead import StepsAhead
from naru_worker.adapters.ops.protocol import BatchInputs
from naru_worker.core.ahead import NotAhead
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.scheduler import Scheduler

PROMPT = "shared beginning of a prompt"
LETTERS = tuple((letter, 20.0) for letter in range(97, 101))


def ahead_engine(**limits: Any) -> tuple[ModelEngine, LaunchingToy, Scheduler, StepsAhead]:
    engine, runner, scheduler = toy_engine(make_runner=LaunchingToy, **limits)
    assert isinstance(runner, LaunchingToy)
    assert engine.steps_ahead is not None
    return engine, runner, scheduler, engine.steps_ahead


def told(outcome: Outcome) -> Any:
    """All that a client gets, but for how it was cut into pieces, and what the prefix cache spared."""
    logprobs = {
        index: [each for delta in outcome.deltas if delta.index == index for each in delta.logprobs]
        for index in outcome.texts
    }
    scores = [delta.prompt_logprobs for delta in outcome.deltas if delta.prompt_logprobs]
    return outcome.texts, outcome.ids, outcome.reasons, logprobs, scores


def assert_whole(engine: ModelEngine, runner: LaunchingToy, scheduler: Scheduler) -> None:
    """Nothing in flight, and no block lost; checked between two steps."""
    assert_all_blocks_free(engine)
    scheduler.check()
    assert not runner.flights
    assert not scheduler.kv.is_in_flight


asks = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a", PROMPT, PROMPT + " and more", "something else"]),
        "max_tokens": st.integers(1, 40),
        "temperature": st.sampled_from([0.0, 1.0]),
        "n": st.sampled_from([1, 1, 1, 2]),
        "priority": st.integers(0, 1),
    },
    optional={
        "stop": st.just(("ab", "dd")),
        "stop_token_ids": st.just((99,)),
        "min_tokens": st.integers(0, 1),
        "logprobs": st.just(2),
        "prompt_logprobs": st.just(1),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(1.5),
        "logit_bias": st.just(LETTERS),
    },
)
turns = st.tuples(asks, st.integers(0, 12), st.booleans())
"""A request, steps after it came, and whether it is cancelled then."""


def asked(number: int, ask: dict[str, Any]) -> Request:
    params = {key: value for key, value in ask.items() if key not in ("prompt", "priority")}
    made = request(str(number), ask["prompt"], seed=number, **params)
    made.priority = ask["priority"]
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(turns, min_size=1, max_size=8), st.integers(14, 60), st.integers(2, 8))
def test_any_traffic_gets_the_tokens_of_the_plain_loop(
    script: list[tuple[dict[str, Any], int, bool]], num_blocks: int, max_num_seqs: int
) -> None:
    limits: dict[str, Any] = {"num_blocks": num_blocks + 12, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 32}
    engine, runner, scheduler, _ = ahead_engine(**limits)
    outbox: list[SequenceDelta] = []
    for number, (ask, num_steps, is_cancelled) in enumerate(script):
        engine.submit(asked(number, ask), 0.0, outbox)
        for _ in range(num_steps):
            if engine.has_work:
                engine.step(outbox)
            scheduler.check()
            for flight in runner.flights:
                blocks = [scheduler.kv._pool.blocks[block] for block in flight.writers(4)]
                assert all(block.ref_count for block in blocks), "a block that is written to is free"
        if is_cancelled:
            engine.cancel(RequestId(str(number)), None, outbox)
    found = finish(engine, outbox)
    assert_whole(engine, runner, scheduler)
    plain, _, _ = toy_engine(**limits)
    expected = run(
        plain, [asked(number, ask) for number, (ask, _, is_cancelled) in enumerate(script) if not is_cancelled]
    )
    for name, outcome in expected.items():
        assert told(found[name]) == told(outcome)


def test_a_steady_batch_is_always_one_step_ahead() -> None:
    engine, runner, scheduler, ahead = ahead_engine()
    in_flight: list[int] = []
    runner.before_fetch = lambda: in_flight.append(len(runner.flights) - 1)
    found = run(engine, [request(name, name, max_tokens=30) for name in "abc"])
    assert all(len(outcome.ids[0]) == 30 for outcome in found.values())
    # Prompts, 28 steps with one more behind them, and the last, which ends them all.
    assert in_flight == [0, *[1] * 28, 0]
    assert ahead.num_ahead == 28
    assert ahead.not_ahead == {NotAhead.PROMPTS: 1, NotAhead.ALL_END: 1}
    assert_whole(engine, runner, scheduler)


def test_a_text_that_stops_costs_one_token_that_nobody_sees_and_nobody_caches() -> None:
    engine, runner, scheduler, _ = ahead_engine()
    first = run(engine, [request("all", PROMPT, max_tokens=20)])["all"].ids[0]
    rows: list[int] = []
    runner.before_step = lambda batch: rows.append(len(batch.token_ids))
    outcome = run(engine, [request("stopped", PROMPT, max_tokens=20, stop_token_ids=(first[8],))])["stopped"]
    assert list(outcome.ids[0]) == list(first[: first.index(first[8]) + 1])
    assert outcome.reasons[0] is FinishReason.STOP
    assert rows == [*rows[:1], *[1] * len(outcome.ids[0])], "as many steps as tokens, and one in vain"
    assert_whole(engine, runner, scheduler)


def test_blocks_of_what_ended_come_back_only_when_the_extra_step_is_over() -> None:
    engine, runner, scheduler, _ = ahead_engine()
    outbox: list[SequenceDelta] = []
    for name in ("short", "long"):
        engine.submit(request(name, name * 3, max_tokens=40), 0.0, outbox)
    for _ in range(5):
        engine.step(outbox)
    [flight] = runner.flights
    engine.cancel(RequestId("short"), None, outbox)
    blocks = [scheduler.kv._pool.blocks[block] for block in flight.writers(4)]
    assert [block.ref_count for block in blocks] == [1, 1]
    engine.step(outbox)
    assert sorted(block.ref_count for block in blocks) == [0, 1]
    finish(engine, outbox)
    assert_whole(engine, runner, scheduler)


ONE: dict[str, Any] = {"max_tokens": 12}


def test_beams_wait_for_all_candidates() -> None:
    engine, runner, scheduler, ahead = ahead_engine()
    found = run(engine, [request("a", **ONE, beam_width=2, n=2)])
    plain, _, _ = toy_engine()
    assert told(found["a"]) == told(run(plain, [request("a", **ONE, beam_width=2, n=2)])["a"])
    assert ahead.num_ahead == 0
    assert ahead.not_ahead[NotAhead.BEAMS] > 5
    assert_whole(engine, runner, scheduler)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_the_token_that_is_being_drawn_is_penalised_like_all_before_it(penalty: str) -> None:
    params: dict[str, Any] = {"max_tokens": 20, "logit_bias": LETTERS, "seed": 3, penalty: 1.9}
    engine, runner, scheduler, ahead = ahead_engine()
    found = run(engine, [request("a", **params)])
    plain, _, _ = toy_engine()
    assert told(found["a"]) == told(run(plain, [request("a", **params)])["a"])
    assert ahead.num_ahead == 18
    assert_whole(engine, runner, scheduler)


def test_masks_and_guesses_wait_for_the_token() -> None:
    for reason, limits, item in (
        (NotAhead.GRAMMAR, {}, structured("a", wish_of("regex", "[a-z]{20}"))),
        (NotAhead.DRAFTS, {"max_draft_tokens": 4}, request("a", max_tokens=20)),
    ):
        engine, runner, scheduler, ahead = ahead_engine(**limits)
        assert len(run(engine, [item])["a"].ids[0]) == 20
        assert ahead.num_ahead == 0
        assert set(ahead.not_ahead) == {NotAhead.PROMPTS, reason}
        assert_whole(engine, runner, scheduler)


def test_who_comes_is_let_in_after_the_step_in_flight_and_a_full_house_goes_on_ahead() -> None:
    engine, runner, scheduler, ahead = ahead_engine(max_num_seqs=2)
    outbox: list[SequenceDelta] = []
    for name in ("a", "b"):
        engine.submit(request(name, max_tokens=9), 0.0, outbox)
        for _ in range(3):
            engine.step(outbox)
    assert ahead.not_ahead[NotAhead.ARRIVALS] == 1
    assert ahead.is_busy
    engine.submit(request("c", max_tokens=9), 0.0, outbox)
    num_before = ahead.num_ahead
    engine.step(outbox)
    assert ahead.num_ahead == num_before + 1, "there is no place for it, so nobody waits for it"
    found = finish(engine, outbox)
    assert all(len(outcome.ids[0]) == 9 for outcome in found.values())
    assert_whole(engine, runner, scheduler)


def test_a_model_that_shares_the_device_takes_its_turns_one_by_one() -> None:
    engine, runner, scheduler, ahead = ahead_engine()
    outbox: list[SequenceDelta] = []
    engine.submit(request("a", max_tokens=9), 0.0, outbox)
    while engine.has_work:
        engine.step(outbox, is_alone=False)
        assert not runner.flights
    assert set(ahead.not_ahead) == {NotAhead.SHARED}
    assert_whole(engine, runner, scheduler)


def test_a_step_that_finds_no_room_ahead_is_run_in_its_turn() -> None:
    engine, runner, scheduler, ahead = ahead_engine()

    def refuse(batch: BatchInputs) -> None:
        if batch.token_ids.min() < 0:
            raise Unavailable("no room")

    runner.before_step = refuse
    assert len(run(engine, [request("a", **ONE)])["a"].ids[0]) == 12
    assert (ahead.num_ahead, ahead.not_ahead[NotAhead.REFUSED]) == (0, 10)
    assert_whole(engine, runner, scheduler)


@pytest.mark.parametrize("num_fetches", [2, 5])
def test_a_step_that_fails_ends_its_requests_and_the_step_behind_it(num_fetches: int) -> None:
    engine, runner, scheduler, ahead = ahead_engine()
    count = 0

    def fail() -> None:
        nonlocal count
        count += 1
        if count == num_fetches:
            raise Unavailable("the device is gone")

    runner.before_fetch = fail
    outbox: list[SequenceDelta] = []
    for name in ("a", "b"):
        engine.submit(request(name, **ONE), 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
        scheduler.check()
    errors = {delta.request_id: delta.error for delta in outbox if delta.is_last}
    assert {str(error) for error in errors.values()} == {"the device is gone"}
    assert len(errors) == 2
    assert_whole(engine, runner, scheduler)
    assert len(run(engine, [request("c", **ONE)])["c"].ids[0]) == 12
    assert ahead.num_ahead
