"""One model's engine over a toy model: what comes out must not depend on who else is in the batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from toy_model import EOS, NUM_TOKENS, ToyRunner, toy_engine, toy_logits
from toy_runs import assert_all_blocks_free, finish, request, run, solo

from naru_proto.errors import ContextLengthExceeded, InternalError, InvalidRequest, Unavailable
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.ops.protocol import BatchInputs, DeviceFault
from naru_worker.core.request import FinishReason, Request, RequestId


def test_greedy_output_is_the_argmax_of_every_prefix() -> None:
    engine, _, _ = toy_engine()
    outcome = run(engine, [request("a", "hello", max_tokens=20)])["a"]
    context = tuple(b"hello")
    for token_id in outcome.ids[0]:
        logits = toy_logits(context)
        logits[NUM_TOKENS:] = -100.0
        assert token_id == int(logits.argmax())
        context += (token_id,)
    assert outcome.reasons == {0: FinishReason.LENGTH}
    assert outcome.usage is not None
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (5, 20)
    assert_all_blocks_free(engine)


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 64, 300])
def test_output_does_not_depend_on_the_size_of_prefill_chunks(budget: int) -> None:
    engine, _, _ = toy_engine(max_num_seqs=1, max_num_batched_tokens=budget)
    prompt = "the quick brown fox jumps over the lazy dog, and then it sleeps in the sun"
    assert run(engine, [request("a", prompt)])["a"].ids == solo(request("a", prompt)).ids


def test_many_mixed_requests_equal_their_solo_output_under_forced_preemption() -> None:
    def mixed(i: int) -> Request:
        prompt = "shared system prompt, " * (i % 3) + f"user {i}: " + "tell me more " * (i % 5)
        params: dict[str, Any] = {"max_tokens": 8 + (i * 7) % 40}
        if i % 2:
            params |= {"temperature": 0.9, "seed": i}
        if i % 5 == 0:
            params |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        if i % 7 == 0:
            params |= {"n": 2, "temperature": 1.0, "seed": 77 + i}
        if i % 11 == 0:
            params |= {"stop": ("ab", "e")}
        return request(f"r{i}", prompt, **params)

    requests = [mixed(i) for i in range(64)]
    # Ten of these requests need about 10 * 30 blocks of 4.
    engine, _, scheduler = toy_engine(num_blocks=301)
    outbox: list[SequenceDelta] = []
    for item in requests:
        engine.submit(item, 0.0, outbox)
    cancelled = {f"r{i}" for i in range(0, 64, 3)}
    while engine.has_work:
        engine.step(outbox)
        scheduler.check()
        alive = {d.request_id for d in outbox if d.token_ids} - {d.request_id for d in outbox if d.is_last}
        for name in sorted(cancelled & alive):
            if sum(len(d.token_ids) for d in outbox if d.request_id == name) >= 4:
                engine.cancel(RequestId(name), None, outbox)
    outcomes = finish(engine, outbox)
    assert set(outcomes) == {item.request_id for item in requests}
    assert engine.stats.num_preemptions > 0
    for item in requests:
        expected, got = solo(item), outcomes[item.request_id]
        for index, ids in got.ids.items():
            if FinishReason.CANCELLED in got.reasons.values():
                assert expected.ids[index][: len(ids)] == ids
            else:
                assert (ids, got.texts[index]) == (expected.ids[index], expected.texts[index])
    assert any(FinishReason.CANCELLED in o.reasons.values() for o in outcomes.values())
    assert_all_blocks_free(engine)


def test_a_step_that_fails_ends_only_its_own_requests() -> None:
    engine, runner, scheduler = toy_engine(max_num_seqs=2)

    def fail_once(batch: BatchInputs) -> None:
        runner.before_step = lambda batch: None
        raise RuntimeError("the device is on fire")

    outbox: list[SequenceDelta] = []
    names = ["a", "b", "waits"]
    for name in names:
        engine.submit(request(name), 0.0, outbox)
    engine.step(outbox)
    runner.before_step = fail_once
    engine.step(outbox)
    scheduler.check()
    outcomes = finish(engine, outbox)
    for name in ("a", "b"):
        error = outcomes[name].error
        assert isinstance(error, InternalError)
        assert error.retryable
        assert "RuntimeError" in error.message
        assert "fire" not in error.message
    assert outcomes["waits"].ids == solo(request("waits")).ids
    assert engine.stats.num_failed_steps == 1
    assert_all_blocks_free(engine)


def test_a_failed_device_ends_the_engine_and_no_request() -> None:
    engine, runner, _ = toy_engine(max_num_seqs=2)
    outbox: list[SequenceDelta] = []
    engine.submit(request("a"), 0.0, outbox)

    def fail(batch: BatchInputs) -> None:
        raise DeviceFault("ECC error")

    runner.before_step = fail
    with pytest.raises(DeviceFault, match="ECC error"):
        engine.step(outbox)
    assert not any(delta.is_last for delta in outbox)


def test_a_result_of_the_wrong_shape_is_a_failed_step() -> None:
    engine, runner, _ = toy_engine()
    full = runner.run

    def short(batch: BatchInputs, sampling: object) -> object:
        output = full(batch, sampling)  # type: ignore[arg-type]
        return replace(output, token_ids=output.token_ids[:-1])

    runner.run = short  # type: ignore[method-assign,assignment]
    outcomes = run(engine, [request("a"), request("b")])
    assert all(isinstance(o.error, InternalError) for o in outcomes.values())
    assert_all_blocks_free(engine)


def test_seeded_draws_do_not_depend_on_the_batch() -> None:
    def seeded() -> Request:
        return request("s", temperature=1.0, seed=42, max_tokens=24)

    alone = solo(seeded())
    engine, _, _ = toy_engine()
    others = [request(f"o{i}", f"other {i}", temperature=1.0 + i / 10, max_tokens=30) for i in range(7)]
    together = run(engine, [*others[:3], seeded(), *others[3:]])
    assert together["s"].ids == alone.ids
    assert len(set(alone.ids[0])) > 3, "successive draws differ"
    assert len({o.ids[0] for name, o in together.items() if name != "s"}) == 7


def test_choices_of_one_seed_differ_and_come_again() -> None:
    first = solo(request("a", temperature=1.0, seed=7, n=3, max_tokens=16))
    again = solo(request("a", temperature=1.0, seed=7, n=3, max_tokens=16))
    assert first.ids == again.ids
    assert len(set(first.ids.values())) == 3
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len("once upon"), 48)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_penalties_stay_with_their_request(order: tuple[int, int]) -> None:
    pair = [
        request("penalised", repetition_penalty=1.8, frequency_penalty=0.7, max_tokens=40),
        request("plain", top_k=1, seed=5, temperature=1.0, max_tokens=40),
    ]
    expected = {str(item.request_id): solo(item).ids for item in pair}
    engine, _, _ = toy_engine()
    together = run(engine, [pair[i] for i in order])
    assert {name: o.ids for name, o in together.items()} == expected
    unpenalised = solo(request("plain", max_tokens=40)).ids
    assert expected["plain"] == unpenalised != expected["penalised"]


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 23])
def test_a_prefix_hit_gives_the_same_answer(length: int) -> None:
    prompt = "abcdefghijklmnopqrstuvwxyz"[:length]
    engine, _, _ = toy_engine()
    outcomes = [run(engine, [request("a", prompt, repetition_penalty=1.3)])["a"] for _ in range(3)]
    assert outcomes[0].ids == outcomes[1].ids == outcomes[2].ids
    assert outcomes[0].usage is not None
    assert outcomes[1].usage is not None
    assert outcomes[0].usage.cached_tokens == 0
    # Whole blocks of 4, and the last token is always computed again.
    assert outcomes[1].usage.cached_tokens == min(length // 4 * 4, length - 1)
    assert outcomes[1].deltas[0].cached_tokens == outcomes[1].usage.cached_tokens


def test_salts_share_nothing() -> None:
    engine, _, _ = toy_engine()
    prompt = "a secret that is long enough"
    run(engine, [request("a", prompt, salt=b"one")])
    other = run(engine, [request("b", prompt, salt=b"two")])["b"]
    assert other.usage is not None
    assert other.usage.cached_tokens == 0


def test_prompt_logprobs_come_once_per_token_whole_and_in_order() -> None:
    prompt = "score these tokens please"
    engine, _, _ = toy_engine(num_blocks=30, max_num_seqs=4, max_num_batched_tokens=6)
    others = [request(f"o{i}", f"noise {i} " * 2, max_tokens=40) for i in range(3)]
    scored = request("s", prompt, prompt_logprobs=2, logprobs=1, max_tokens=3)
    outcome = run(engine, [*others, scored])["s"]
    positions = [p for d in outcome.deltas for p in d.prompt_logprobs]
    assert len(positions) == len(prompt)
    assert positions[0].chosen is None
    for i, position in enumerate(positions[1:], start=1):
        assert position.chosen is not None
        assert position.chosen.token_id == prompt.encode()[i]
        assert len(position.top) == 2
        assert position.top[0].logprob >= position.top[1].logprob
    assert [len(d.logprobs) for d in outcome.deltas if d.token_ids] == [1, 1, 1]
    assert outcome.ids == solo(request("s", prompt, max_tokens=3)).ids


def test_zero_tokens_compute_the_prompt_only() -> None:
    engine, _, _ = toy_engine()
    outcome = run(engine, [request("a", "the sky is blue", max_tokens=0, prompt_logprobs=1)])["a"]
    assert outcome.reasons == {0: FinishReason.LENGTH}
    assert outcome.texts == {0: ""}
    assert sum(len(d.prompt_logprobs) for d in outcome.deltas) == len("the sky is blue")
    assert outcome.usage is not None
    assert outcome.usage.completion_tokens == 0
    assert_all_blocks_free(engine)


def test_a_stop_string_ends_the_sequence_in_the_scheduler_too() -> None:
    whole = solo(request("a", max_tokens=40)).texts[0]
    stop = whole[9:13]
    engine, _, scheduler = toy_engine()
    outcome = run(engine, [request("a", max_tokens=40, stop=(stop,))])["a"]
    assert outcome.texts[0] == whole[: whole.index(stop)]
    assert outcome.reasons == {0: FinishReason.STOP}
    assert [d.stop_reason for d in outcome.deltas if d.finish_reason] == [stop]
    assert scheduler.num_requests == 0
    assert_all_blocks_free(engine)


def test_eos_is_not_drawn_before_min_tokens() -> None:
    forced: dict[str, Any] = {"logit_bias": ((EOS, 100.0),), "ignore_eos": False, "max_tokens": 10}
    assert len(solo(request("a", **forced)).ids[0]) == 1
    late = solo(request("a", min_tokens=4, **forced))
    assert len(late.ids[0]) == 5
    assert late.ids[0][-1] == EOS
    assert EOS not in late.ids[0][:-1]


def test_ids_the_tokenizer_does_not_know_are_never_drawn() -> None:
    outcome = solo(request("a", temperature=50.0, seed=3, max_tokens=200))
    assert max(outcome.ids[0]) < NUM_TOKENS


def test_what_can_never_be_served_is_refused_without_touching_others() -> None:
    engine, _, _ = toy_engine(num_blocks=9, max_model_len=32)
    outcomes = run(
        engine,
        [
            request("fine"),
            request("empty", ""),
            request("long", "x" * 33),
            request("wide", "x" * 8, n=8, temperature=1.0, max_tokens=20),
        ],
    )
    assert isinstance(outcomes["empty"].error, InvalidRequest)
    assert isinstance(outcomes["long"].error, ContextLengthExceeded)
    assert isinstance(outcomes["wide"].error, ContextLengthExceeded)
    assert outcomes["wide"].error.param == "n"
    assert outcomes["fine"].ids == solo(request("fine")).ids


def test_cancelling_reaches_every_state_and_frees_all_blocks() -> None:
    engine, _, _ = toy_engine(max_num_seqs=2)
    outbox: list[SequenceDelta] = []
    for name in ("decoding", "prefilling", "waiting"):
        engine.submit(request(name, name * 20, max_tokens=60, n=2, temperature=1.0), 0.0, outbox)
    engine.cancel(RequestId("waiting"), None, outbox)
    for _ in range(3):
        engine.step(outbox)
    engine.cancel(RequestId("decoding"), None, outbox)
    engine.cancel(RequestId("prefilling"), Unavailable("gone"), outbox)
    engine.cancel(RequestId("prefilling"), None, outbox)
    engine.cancel(RequestId("never heard of"), None, outbox)
    outcomes = finish(engine, outbox)
    assert set(outcomes["waiting"].reasons.values()) == {FinishReason.CANCELLED}
    assert set(outcomes["decoding"].reasons.values()) == {FinishReason.CANCELLED}
    assert isinstance(outcomes["prefilling"].error, Unavailable)
    assert_all_blocks_free(engine)


def test_text_that_cannot_be_made_ends_one_request_only() -> None:
    engine, _, _ = toy_engine()
    outbox: list[SequenceDelta] = []
    engine.submit(request("bad"), 0.0, outbox)
    engine.submit(request("good"), 0.0, outbox)
    engine._outputs[RequestId("bad")]._streams.clear()
    outcomes = finish(engine, outbox)
    assert isinstance(outcomes["bad"].error, InternalError)
    assert outcomes["good"].ids == solo(request("good")).ids
    assert_all_blocks_free(engine)


def test_latencies_are_counted_per_token() -> None:
    now = itertools.count()
    engine, _, _ = toy_engine(clock=lambda: float(next(now)))
    run(engine, [request("a", max_tokens=5), request("b", max_tokens=3)])
    assert sum(engine.stats.ttft_s.counts) == 2
    assert sum(engine.stats.itl_s.counts) == 4 + 2
    assert sum(engine.stats.e2e_s.counts) == 2
    assert engine.stats.finished == {"length": 2}
    assert engine.stats.prompt_tokens == 2 * len("once upon")
    assert engine.stats.generated_tokens == 8


def test_a_toy_runner_notices_what_it_must() -> None:
    engine, runner, _ = toy_engine(enable_prefix_caching=False)
    honest = run(engine, [request("a", max_tokens=10)])["a"]
    runner.cache[:] = -7
    outbox: list[SequenceDelta] = []
    engine.submit(request("a", max_tokens=10), 0.0, outbox)
    engine.step(outbox)
    assert isinstance(runner, ToyRunner)
    runner.cache[runner.cache >= 0] = 3
    assert finish(engine, outbox)["a"].ids != honest.ids
