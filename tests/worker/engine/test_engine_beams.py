"""Beam search in an engine: text, stops, log probabilities, company, and every way to end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from real_engine import choices_of, request_of, run_all
from toy_model import EOS, NUM_TOKENS, toy_engine, toy_logits

from naru_proto.errors import InvalidRequest
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.ops.protocol import BatchInputs, WeightsPending
from naru_worker.core.request import FinishReason, PriorOutput, RequestId

PROMPT = list(b"once upon a time")
Ends = Callable[[tuple[int, ...]], bool]


def plain_search(
    width: int, max_tokens: int, *, length_penalty: float = 1.0, ends: Ends = lambda output: output[-1] == EOS
) -> list[tuple[int, ...]]:
    """Every continuation of every beam, sorted; `ends`: whether a text is complete."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    complete: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        ranked: list[tuple[float, tuple[int, ...]]] = []
        for score, output in live:
            logprobs = logprobs_after(output)
            for token in np.argsort(-logprobs)[: 4 * width].tolist():
                ranked.append((score + float(logprobs[token]), (*output, token)))
        ranked.sort(key=lambda each: -each[0])
        done = [length == max_tokens or ends(output) for _, output in ranked]
        found = [each for each, is_done in zip(ranked[:width], done, strict=False) if is_done]
        complete += [(score / length**length_penalty, output) for score, output in found]
        complete = sorted(complete, key=lambda each: -each[0])[:width]
        live = [each for each, is_done in zip(ranked, done, strict=True) if not is_done][:width]
        if live and len(complete) == width and live[0][0] / length**length_penalty <= complete[-1][0]:
            break
    return [output for _, output in complete]


def logprobs_after(output: tuple[int, ...]) -> Any:
    logits = toy_logits((*PROMPT, *output)).astype(np.float64)
    logits[NUM_TOKENS:] = -np.inf
    return logits - np.log(np.exp(logits).sum())


def texts_of(deltas: list[SequenceDelta]) -> list[str]:
    found: dict[int, str] = {}
    for delta in deltas:
        found[delta.index] = found.get(delta.index, "") + delta.text
    return [found[index] for index in sorted(found)]


def ends_of(deltas: list[SequenceDelta]) -> list[tuple[FinishReason, str]]:
    last = {delta.index: delta for delta in deltas if delta.finish_reason is not None}
    return [(delta.finish_reason, delta.stop_reason) for _, delta in sorted(last.items()) if delta.finish_reason]


@pytest.mark.parametrize(("width", "n", "penalty"), [(1, 1, 1.0), (3, 2, 1.0), (4, 4, 0.0), (6, 3, -0.5)])
def test_choices_are_the_best_texts_and_usage_counts_them_alone(width: int, n: int, penalty: float) -> None:
    engine, _, scheduler = toy_engine()
    deltas = run_all(
        engine, scheduler, [request_of(PROMPT, beam_width=width, n=n, max_tokens=9, length_penalty=penalty)]
    )
    outputs = choices_of(deltas)
    assert outputs == plain_search(width, 9, length_penalty=penalty)[:n]
    assert [delta.is_last for delta in deltas] == [False] * (n - 1) + [True]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == sum(map(len, outputs))
    assert deltas[-1].usage.prompt_tokens == len(PROMPT)
    assert engine.stats.generated_tokens == sum(map(len, outputs))


def test_a_stop_token_ends_a_beam_and_has_no_text() -> None:
    stops = (ord("e"), ord("t"), ord("k"), ord("m"))
    engine, _, scheduler = toy_engine()
    deltas = run_all(engine, scheduler, [request_of(PROMPT, beam_width=4, n=4, max_tokens=12, stop_token_ids=stops)])
    expected = plain_search(4, 12, ends=lambda output: output[-1] in (*stops, EOS))
    assert choices_of(deltas) == expected
    for text, (reason, stop), output in zip(texts_of(deltas), ends_of(deltas), expected, strict=True):
        if output[-1] in stops:
            assert (reason, stop) == (FinishReason.STOP, f"token:{output[-1]}")
            assert text == bytes(output[:-1]).decode(errors="replace")
        else:
            assert (reason, stop) == (FinishReason.LENGTH, "")
    assert any(output[-1] in stops for output in expected)


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_stop_strings_end_beams_over_several_tokens_and_are_cut(min_tokens: int) -> None:
    # Pairs of letters that the best beams hold, so that texts are stopped in the middle of a search. No penalty, so
    # that stopped texts, which are short, are among the best.
    found = plain_search(4, 8, length_penalty=0.0)
    pairs = {bytes(output[place : place + 2]) for output in found for place in (1, 3, 6)}
    stops = tuple(sorted(pair.decode() for pair in pairs if pair.isascii()))

    def ends(output: tuple[int, ...]) -> bool:
        text = bytes(output).decode(errors="replace") if EOS not in output else ""
        return output[-1] == EOS or (len(output) > min_tokens and any(text.endswith(stop) for stop in stops))

    engine, _, scheduler = toy_engine()
    request = request_of(
        PROMPT, beam_width=4, n=4, max_tokens=10, stop=stops, min_tokens=min_tokens, length_penalty=0.0
    )
    deltas = run_all(engine, scheduler, [request])
    expected = plain_search(4, 10, ends=ends, length_penalty=0.0)
    assert choices_of(deltas) == expected
    stopped = 0
    for text, (reason, stop), output in zip(texts_of(deltas), ends_of(deltas), expected, strict=True):
        if reason is FinishReason.STOP:
            stopped += 1
            assert stop in stops
            assert bytes(output).decode(errors="replace") == text + stop
    assert stopped


def test_log_probabilities_are_those_of_the_text_and_sum_to_its_score() -> None:
    engine, _, scheduler = toy_engine()
    deltas = run_all(engine, scheduler, [request_of(PROMPT, beam_width=3, n=3, max_tokens=6, logprobs=2)])
    for index, output in enumerate(choices_of(deltas)):
        positions = [each for delta in deltas if delta.index == index for each in delta.logprobs]
        assert len(positions) == len(output)
        for place, (token_id, position) in enumerate(zip(output, positions, strict=True)):
            logprobs = logprobs_after(output[:place])
            order = np.argsort(-logprobs, kind="stable").tolist()
            assert position.chosen is not None
            assert (position.chosen.token_id, position.chosen.rank) == (token_id, order.index(token_id) + 1)
            assert position.chosen.logprob == pytest.approx(logprobs[token_id], abs=1e-5)
            assert [each.token_id for each in position.top] == order[:2]
            assert [each.rank for each in position.top] == [1, 2]


def test_long_answers_with_log_probabilities_go_out_in_pieces_that_join() -> None:
    ticks = itertools.count(1)
    engine, _, scheduler = toy_engine(num_blocks=513, clock=lambda: float(next(ticks)))
    request = request_of(PROMPT, beam_width=2, n=2, max_tokens=150, logprobs=20, ignore_eos=True)
    deltas = run_all(engine, scheduler, [request])
    assert len(deltas) > 6
    assert all(len(delta.logprobs) == len(delta.token_ids) <= 512 // 21 for delta in deltas)
    outputs = choices_of(deltas)
    assert [len(each) for each in outputs] == [150, 150]
    assert texts_of(deltas) == [bytes(each).decode(errors="replace") for each in outputs]
    assert sum(delta.is_last for delta in deltas) == 1
    # Pieces of one answer are no tokens that somebody waited for.
    assert sum(engine.stats.itl_s.counts) == 0
    assert sum(engine.stats.ttft_s.counts) == 1


def test_beams_and_plain_requests_under_pressure_equal_their_solo_runs() -> None:
    def mixed(name: str, i: int) -> Any:
        prompt = [*b"shared system prompt, " * (i % 3), *f"user {i}: ".encode()]
        if i % 2:
            return request_of(prompt, name, beam_width=1 + i % 5, n=1 + i % 2, max_tokens=10 + i, length_penalty=0.5)
        return request_of(prompt, name, temperature=0.0, max_tokens=40 + i, ignore_eos=True)

    indices = [i for i in range(14) if i != 5]
    engine, _, scheduler = toy_engine(num_blocks=70, max_num_seqs=12, max_num_batched_tokens=24)
    together = run_all(engine, scheduler, [mixed(f"r{i}", i) for i in indices])
    assert engine.stats.num_preemptions > 0
    for i in indices:
        alone, _, one = toy_engine(enable_prefix_caching=False)
        assert choices_of(together, f"r{i}") == choices_of(run_all(alone, one, [mixed("a", i)])), i


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_cancelled_search_ends_once_and_frees_all(num_steps: int) -> None:
    engine, _, scheduler = toy_engine(max_num_batched_tokens=64)
    outbox: list[SequenceDelta] = []
    engine.submit(request_of(PROMPT, beam_width=4, n=2, max_tokens=30), 0.0, outbox)
    for _ in range(num_steps):
        engine.step(outbox)
    assert not outbox
    engine.cancel(RequestId("a"), None, outbox)
    assert [delta.finish_reason for delta in outbox] == [FinishReason.CANCELLED] * 2
    assert [delta.is_last for delta in outbox] == [False, True]
    _assert_empty(engine, scheduler)


def test_a_failed_step_ends_the_search_with_its_error_alone() -> None:
    engine, runner, scheduler = toy_engine()
    outbox: list[SequenceDelta] = []
    engine.submit(request_of(PROMPT, beam_width=4, n=2, max_tokens=30), 0.0, outbox)
    for _ in range(3):
        engine.step(outbox)
    steps = itertools.count()

    def fail_once(batch: BatchInputs) -> None:
        if next(steps) == 0:
            raise RuntimeError("broken")

    runner.before_step = fail_once
    engine.step(outbox)
    [delta] = outbox
    assert delta.is_last
    assert delta.error is not None
    _assert_empty(engine, scheduler)
    assert choices_of(run_all(engine, scheduler, [request_of(PROMPT, "b", beam_width=2, max_tokens=5)]), "b") == [
        plain_search(2, 5)[0]
    ]


@pytest.mark.parametrize("stop", [(), ("qq",)])
def test_a_search_that_was_told_in_part_elsewhere_tells_the_rest(stop: tuple[str, ...]) -> None:
    params: dict[str, Any] = {"beam_width": 4, "n": 3, "max_tokens": 9, "logprobs": 1, "stop": stop}
    engine, _, scheduler = toy_engine()
    whole = choices_of(run_all(engine, scheduler, [request_of(PROMPT, **params)]))
    told = (PriorOutput(whole[0], is_finished=True), PriorOutput(whole[1][:4]), PriorOutput())
    engine, _, scheduler = toy_engine()
    deltas = run_all(engine, scheduler, [request_of(PROMPT, prior=told, **params)])
    assert {delta.index: delta.token_ids for delta in deltas} == {1: whole[1][4:], 2: whole[2]}
    assert {delta.index: delta.text.encode() for delta in deltas} == {1: bytes(whole[1][4:]), 2: bytes(whole[2])}
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 27
    _assert_empty(engine, scheduler)
    # What this search did not come to cannot be gone on with.
    odd = (told[0], PriorOutput((1, 2, 3)), told[2])
    outbox: list[SequenceDelta] = []
    engine.submit(request_of(PROMPT, "odd", prior=odd, **params), 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
    [delta] = outbox
    assert delta.is_last
    assert delta.error is not None
    _assert_empty(engine, scheduler)


def test_a_step_that_waits_for_weights_is_run_again_and_changes_nothing() -> None:
    now = itertools.count()
    engine, runner, scheduler = toy_engine(clock=lambda: float(next(now)))
    begun = itertools.count()

    def pend(batch: BatchInputs) -> None:
        if next(begun) % 3:
            raise WeightsPending

    runner.before_step = pend
    outbox: list[SequenceDelta] = []
    engine.submit(request_of(PROMPT, beam_width=4, n=4, max_tokens=9), 0.0, outbox)
    while engine.has_work:
        engine.step(outbox)
    assert choices_of(outbox) == plain_search(4, 9)
    _assert_empty(engine, scheduler)
    # And a search that is given up while its step is held leaves nothing.
    outbox.clear()
    engine.submit(request_of(PROMPT, "gone", beam_width=4, max_tokens=9), 0.0, outbox)
    while next(begun) % 3 != 2:
        pass
    for _ in range(4):
        engine.step(outbox)
    engine.cancel(RequestId("gone"), None, outbox)
    runner.before_step = lambda batch: None
    while engine.has_work:
        engine.step(outbox)
    assert [delta.finish_reason for delta in outbox] == [FinishReason.CANCELLED]
    _assert_empty(engine, scheduler)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": -1}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "min_p": 0.1}, "min_p"),
        ({"beam_width": 2, "presence_penalty": 0.5}, "presence_penalty"),
        ({"beam_width": 2, "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "logit_bias": ((5, 1.0),)}, "logit_bias"),
        ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"beam_width": 32, "logprobs": 20, "max_tokens": 1561}, "logprobs"),
        ({"length_penalty": 0.5}, "length_penalty"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused_by_name(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_of(PROMPT, **params)
    assert refused.value.param == param


@pytest.mark.parametrize("harmless", [{"temperature": 0.0}, {"temperature": 1.0}, {"seed": 7}, {"top_k": -1}])
def test_what_changes_nothing_is_let_through(harmless: dict[str, Any]) -> None:
    engine, _, scheduler = toy_engine()
    request = request_of(PROMPT, beam_width=3, n=3, max_tokens=5, **harmless)
    assert choices_of(run_all(engine, scheduler, [request])) == plain_search(3, 5)


def _assert_empty(engine: ModelEngine, scheduler: Any) -> None:
    scheduler.check()
    assert not engine.has_work
    assert scheduler.num_requests == 0
    assert engine.kv_stats().num_used_blocks == 0
