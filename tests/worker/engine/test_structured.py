"""Structured output in the engine: the text is what was asked for, whoever else is in the batch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from bench.random_schemas import random_schema, validator_of
from llguidance import LLExecutor
from toy_grammars import structured, wish_of
from toy_model import EOS, NUM_TOKENS, toy_engine, toy_logits
from toy_runs import Outcome, assert_all_blocks_free, finish, request, run, solo

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.engine import grammar_masks
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.grammar_masks import MaskJob, MaskThread
from naru_worker.adapters.ops.protocol import BatchInputs, SampleOutput, SamplingBatch, WeightsPending
from naru_worker.core.request import FinishReason, PriorOutput, Request, RequestId
from naru_worker.core.structured import StructuredOutput

RECORD = wish_of(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 3, "maxLength": 8},
                "kind": {"enum": ["one", "two", "three"]},
                "size": {"type": "integer", "minimum": 1, "maximum": 900},
            },
            "required": ["name", "kind", "size"],
            "additionalProperties": False,
        }
    ),
)
WORDS = wish_of("regex", "[a-z]{4,9}( [a-z]{4,9}){1,3}")


def alone(item: Request) -> Outcome:
    """A structured request's outcome in an engine of its own."""
    engine, _, _ = toy_engine()
    assert item.params.structured is not None
    return run(engine, [copy_of(item)])[item.request_id]


def copy_of(item: Request) -> Request:
    given = {field.name: getattr(item.params, field.name) for field in dataclasses.fields(item.params)}
    wish = given.pop("structured")
    prompt = bytes(item.prompt_token_ids).decode()
    return structured(item.request_id, wish, prompt, **{**given, "seed": item.seed})


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        (wish_of("regex", "[0-9]{3}-[a-f]+x"), r"[0-9]{3}-[a-f]+x"),
        (wish_of("regex", "^(yes|no)$"), r"yes|no"),
        (wish_of("choice", "yes", "no", "no way", 'a "quoted"\n\\ é'), 'yes|no|no way|a "quoted"\n\\\\ é'),
        (
            wish_of("grammar", 'start: greeting " " NAME "!"\ngreeting: "hi" | "ho"\nNAME: /[A-Z][a-z]{2}/'),
            r"h[io] [A-Z][a-z]{2}!",
        ),
        (RECORD, r'\{"name":".{3,}","kind":"(one|two|three)","size":[1-9][0-9]{0,2}\}'),
        (wish_of("regex", "a{0}"), ""),
        (wish_of("choice", ""), ""),
    ],
)
def test_the_text_is_what_was_asked_for_and_ends_there(wish: StructuredOutput, pattern: str) -> None:
    for seed in range(4):
        outcome = alone(structured("a", wish, temperature=1.5, seed=seed, max_tokens=200))
        assert re.fullmatch(pattern, outcome.texts[0]), outcome.texts[0]
        assert outcome.reasons == {0: FinishReason.STOP}
        assert "".join(d.text for d in outcome.deltas) == outcome.texts[0]


@pytest.mark.parametrize("seed", range(60))
def test_random_schemas_give_text_that_validates(seed: int) -> None:
    schema = random_schema(seed)
    engine, _, _ = toy_engine(num_blocks=600, max_model_len=2048)
    wish = wish_of("json_schema", json.dumps(schema))
    outcome = run(engine, [structured("a", wish, temperature=1.0, seed=seed, max_tokens=2000)])["a"]
    assert outcome.error is None, outcome.error
    assert outcome.reasons == {0: FinishReason.STOP}, outcome.texts[0]
    validator_of(schema).validate(json.loads(outcome.texts[0]))


def mixed(i: int) -> Request:
    prompt = "shared system prompt, " * (i % 3) + f"user {i}: " + "tell me more " * (i % 5)
    params: dict[str, Any] = {"max_tokens": 12 + (i * 7) % 40}
    if i % 2:
        params |= {"temperature": 0.9, "seed": i}
    if i % 5 == 0:
        params |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    if i % 7 == 0:
        params |= {"n": 2, "temperature": 1.0, "seed": 77 + i}
    if i % 11 == 0:
        params |= {"stop": ("ab", "e")}
    if i % 4 == 0:
        return request(f"r{i}", prompt, **params)
    return structured(f"r{i}", RECORD if i % 3 else WORDS, prompt, **params)


def test_plain_and_structured_requests_equal_their_solo_output_under_forced_preemption() -> None:
    requests = [mixed(i) for i in range(40)]
    engine, _, scheduler = toy_engine(num_blocks=241)
    outcomes = run(engine, requests)
    assert engine.stats.num_preemptions > 0
    scheduler.check()
    assert_all_blocks_free(engine)
    for item in requests:
        expected = alone(item) if item.params.structured is not None else solo(item)
        got = outcomes[item.request_id]
        assert (got.ids, got.texts, got.reasons) == (expected.ids, expected.texts, expected.reasons), item.request_id


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_and_cached_prefixes_change_nothing(budget: int) -> None:
    prompt = "the quick brown fox jumps over the lazy dog, and then it sleeps in the sun"
    engine, _, _ = toy_engine(max_num_seqs=1, max_num_batched_tokens=budget)
    expected = alone(structured("a", RECORD, prompt)).ids
    assert run(engine, [structured("a", RECORD, prompt)])["a"].ids == expected
    again = run(engine, [structured("b", RECORD, prompt)])["b"]
    assert again.usage is not None
    assert again.usage.cached_tokens > 0
    assert again.ids == expected


def test_choices_of_one_request_are_matched_each_by_itself() -> None:
    engine, _, _ = toy_engine()
    outcome = run(engine, [structured("a", RECORD, n=8, temperature=1.2, seed=3)])["a"]
    assert len(set(outcome.texts.values())) == 8
    for text in outcome.texts.values():
        assert set(json.loads(text)) == {"name", "kind", "size"}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_prior_output_is_taken_up_where_it_stopped(cut: int) -> None:
    whole = alone(structured("a", RECORD, temperature=0.9, seed=4))
    prior = (PriorOutput(whole.ids[0][:cut]),)
    engine, _, _ = toy_engine()
    rest = run(engine, [structured("a", RECORD, temperature=0.9, seed=4, prior=prior)])["a"]
    assert whole.ids[0][:cut] + rest.ids[0] == whole.ids[0]
    assert rest.reasons == {0: FinishReason.STOP}


def test_prior_output_that_does_not_match_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prior does not match") as caught:
        structured("a", RECORD, prior=(PriorOutput(tuple(b'{"x')),))
    assert caught.value.param == "prior"


def test_a_text_that_is_cut_ends_with_length_and_one_that_just_fits_with_stop() -> None:
    wish = wish_of("choice", "abcdef")
    cut = alone(structured("a", wish, max_tokens=5))
    assert (cut.texts, cut.reasons) == ({0: "abcde"}, {0: FinishReason.LENGTH})
    whole = alone(structured("a", wish, max_tokens=6))
    assert (whole.texts, whole.reasons) == ({0: "abcdef"}, {0: FinishReason.STOP})


def test_min_tokens_keeps_the_end_away_but_is_no_dead_end() -> None:
    outcome = alone(structured("a", wish_of("regex", "[xy]*"), min_tokens=10, temperature=3.0, seed=1, max_tokens=80))
    assert len(outcome.texts[0]) >= 10
    assert alone(structured("a", wish_of("choice", "xy"), min_tokens=10)).texts == {0: "xy"}
    assert alone(structured("a", wish_of("choice", ""), min_tokens=10)).texts == {0: ""}
    # A stop token that is all that the grammar allows is text until it may stop.
    kept = alone(structured("a", wish_of("choice", "xyz"), min_tokens=2, stop_token_ids=(ord("x"),)))
    assert (kept.texts, kept.reasons) == ({0: "xyz"}, {0: FinishReason.STOP})


def test_who_ignores_the_end_gets_the_longest_text_that_is_allowed() -> None:
    free = alone(structured("a", wish_of("regex", "[xy]+"), ignore_eos=True, max_tokens=70))
    assert (len(free.texts[0]), free.reasons) == (70, {0: FinishReason.LENGTH})
    bound = alone(structured("a", wish_of("regex", "[xy]{1,9}"), ignore_eos=True, max_tokens=70))
    assert (len(bound.texts[0]), bound.reasons) == (9, {0: FinishReason.STOP})


def test_a_stop_string_ends_the_text_before_its_grammar_does() -> None:
    outcome = alone(structured("a", wish_of("choice", "one, two, three"), stop=(", tw",)))
    assert (outcome.texts, outcome.reasons) == ({0: "one"}, {0: FinishReason.STOP})


def test_bias_and_penalties_choose_among_what_is_allowed_only() -> None:
    bias = ((ord("q"), 100.0), (ord("y"), 100.0), (EOS, 100.0))
    wish = wish_of("regex", "[xyz]{12}")
    assert alone(structured("a", wish, logit_bias=bias)).texts == {0: "y" * 12}
    spread = alone(structured("a", wish, frequency_penalty=2.0, presence_penalty=2.0))
    assert set(spread.texts[0]) == set("xyz")


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    outcome = alone(structured("a", wish_of("regex", "[0-9]{6}"), "hello", logprobs=3))
    context = tuple(b"hello")
    positions = [position for delta in outcome.deltas for position in delta.logprobs]
    for token_id, position in zip(outcome.ids[0], positions, strict=True):
        raw = toy_logits(context)[:NUM_TOKENS].astype(np.float64)
        logprobs = raw - np.log(np.exp(raw).sum())
        assert position.chosen is not None
        assert position.chosen.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-4)
        assert position.top[0].token_id == int(raw.argmax())
        context += (token_id,)


def test_special_tokens_of_a_grammar_are_shown_on_request() -> None:
    wish = wish_of("grammar", 'start: "a" <sep> /[bc]+/ <sep> "d"')
    hidden = alone(structured("a", wish))
    assert re.fullmatch("a[bc]+d", hidden.texts[0])
    engine, _, _ = toy_engine()
    shown = run(engine, [structured("a", wish, show_special_tokens=True)])["a"]
    assert re.fullmatch("a<sep>[bc]+<sep>d", shown.texts[0])
    assert shown.ids == hidden.ids
    # Where text is all that is allowed, what spells a special token is spelt.
    spelt = alone(structured("a", wish_of("choice", "<sep>")))
    assert spelt.ids[0] == tuple(b"<sep>")
    # An end that is part of the grammar ends the choice, and is no text.
    ended = alone(structured("a", wish_of("grammar", 'start: "a" <eos>')))
    assert (ended.texts, ended.reasons) == ({0: "a"}, {0: FinishReason.STOP})


def test_a_held_step_is_run_again_with_the_same_masks() -> None:
    engine, runner, _ = toy_engine()
    attempts = itertools.count()

    def pend(batch: BatchInputs) -> None:
        if next(attempts) % 3:
            raise WeightsPending("not yet")

    runner.before_step = pend
    outbox: list[SequenceDelta] = []
    engine.submit(structured("a", RECORD, temperature=0.9, seed=4), 0.0, outbox)
    times = itertools.count()
    engine._clock = lambda: float(next(times))
    outcome = finish(engine, outbox)["a"]
    assert outcome.ids == alone(structured("a", RECORD, temperature=0.9, seed=4)).ids


class FailingMasks(MaskThread):
    """Opens each gate, and has nothing written."""

    def post(self, job: MaskJob) -> None:
        job.failure, job.has_failed = "it broke", True
        job.masks.gate[0] = 1


class SilentMasks(MaskThread):
    """Never does anything."""

    def post(self, job: MaskJob) -> None:
        pass


@pytest.mark.parametrize(("masks", "reason"), [(FailingMasks(), "it broke"), (SilentMasks(), "too long")])
def test_masks_that_fail_or_never_come_cost_their_own_requests_only(
    masks: MaskThread, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.01)
    engine, _, _ = toy_engine()
    engine._masks = masks
    outcomes = run(engine, [request("plain"), structured("bad", RECORD), request("other", "a prompt")])
    error = outcomes["bad"].error
    assert isinstance(error, InvalidRequest)
    assert (error.param, reason in error.message) == ("response_format", True)
    for name, prompt in (("plain", "once upon"), ("other", "a prompt")):
        assert outcomes[name].ids == solo(request(name, prompt)).ids
    assert_all_blocks_free(engine)
    engine._masks = MaskThread()
    assert run(engine, [structured("next", RECORD)])["next"].reasons == {0: FinishReason.STOP}


class KeptMasks(MaskThread):
    """Leaves jobs to the test."""

    def __init__(self, jobs: list[MaskJob]) -> None:
        super().__init__()
        self._kept = jobs

    def post(self, job: MaskJob) -> None:
        self._kept.append(job)


def test_masks_that_come_just_after_they_were_given_up_cost_their_own_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.01)
    engine, runner, _ = toy_engine()
    jobs: list[MaskJob] = []
    engine._masks = KeptMasks(jobs)
    run_step = runner.run

    def run_late(batch: BatchInputs, sampling: SamplingBatch) -> SampleOutput:
        output = run_step(batch, sampling)
        while jobs:
            jobs.pop().run(LLExecutor(1))
        return output

    monkeypatch.setattr(runner, "run", run_late)
    outcomes = run(engine, [request("plain"), structured("bad", RECORD), structured("worse", WORDS)])
    for name in ("bad", "worse"):
        error = outcomes[name].error
        assert isinstance(error, InvalidRequest)
        assert "too long" in error.message
    assert outcomes["plain"].ids == solo(request("plain")).ids
    assert engine.stats.num_failed_steps == 0
    assert_all_blocks_free(engine)


def test_a_grammar_that_explodes_on_the_way_ends_its_request_and_no_other() -> None:
    # Too many ways to go on from one place; the text has to get there first.
    ways = [{"type": "object", "properties": {f"k{i}": {}}, "required": [f"k{i}"]} for i in range(2500)]
    schema = {"type": "object", "properties": {"a": {"anyOf": ways}}, "required": ["a"], "additionalProperties": False}
    wish = wish_of("json_schema", json.dumps(schema))
    engine, _, _ = toy_engine()
    outcomes = run(engine, [request("plain"), structured("bad", wish), structured("good", RECORD)])
    assert isinstance(outcomes["bad"].error, InvalidRequest)
    assert outcomes["plain"].ids == solo(request("plain")).ids
    assert outcomes["good"].ids == alone(structured("good", RECORD)).ids


def test_a_cancelled_request_leaves_the_others_as_they_are() -> None:
    engine, _, _ = toy_engine()
    outbox: list[SequenceDelta] = []
    for name in ("a", "b"):
        engine.submit(structured(name, RECORD, f"prompt {name}"), 0.0, outbox)
    for _ in range(6):
        engine.step(outbox)
    engine.cancel(RequestId("a"), None, outbox)
    outcomes = finish(engine, outbox)
    assert outcomes["a"].reasons == {0: FinishReason.CANCELLED}
    assert outcomes["b"].ids == alone(structured("b", RECORD, "prompt b")).ids
