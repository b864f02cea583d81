"""How requests end: stops, limits, cancels, faults; nothing is left behind."""

from __future__ import annotations

import itertools

import pytest

from naru_proto.errors import InternalError
from naru_worker.core.request import FinishReason, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import RowResult
from naru_worker.core.testing import solo_outcome
from naru_worker.core.testing_engine import PretendEngine

B = 4


def params(max_tokens: int | None = 6, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]


# --- ending -----------------------------------------------------------------------------------------------------------


def test_any_eos_id_ends_a_sequence_and_is_a_token_without_text() -> None:
    engine = PretendEngine(vocab_size=9, eos_token_ids=(1, 5, 8))
    ends = set()
    for start in range(9):
        request = engine.request([start], params(60))
        (sequence,) = request.sequences
        engine.check_solo_after_drain(request)
        assert engine.stop_reasons[sequence] == ""
        if engine.finished[sequence] is FinishReason.STOP:
            ends.add(engine.tokens[sequence][-1])
    assert ends == {1, 5, 8}


def test_the_ending_token_is_not_among_those_with_text() -> None:
    engine = PretendEngine(vocab_size=5)
    engine.request([1], params(60, stop_token_ids=(3,)))
    while True:
        plan = engine.scheduler.plan()
        (output,) = engine.scheduler.commit(plan, engine.model.run(plan))
        if output.finish_reason is not None:
            break
        assert output.text_token_ids == output.new_token_ids
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "token:3")
    assert (output.new_token_ids, output.text_token_ids) == ((3,), ())


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("min_tokens", [0, 3, 12])
def test_stops_are_not_obeyed_when_ignored_or_too_early(ignore_eos: bool, min_tokens: int) -> None:
    engine = PretendEngine(vocab_size=4, eos_token_ids=(1,))
    for stop_token_ids in ((), (2,)):
        options = {"ignore_eos": ignore_eos, "min_tokens": min_tokens, "stop_token_ids": stop_token_ids}
        request = engine.request([3], params(12, **options))
        engine.check_solo_after_drain(request)
        assert len(engine.tokens[request.sequences[0]]) > min_tokens or min_tokens == 12


def test_the_model_length_ends_a_sequence() -> None:
    engine = PretendEngine(max_model_len=16)
    for length in (1, 14, 15):
        request = engine.request(range(length), params(None, n=2))
        engine.check_solo_after_drain(request)
        assert len(engine.tokens[request.sequences[0]]) == 16 - length


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_wanted_computes_the_prompt_and_ends_with_length(n: int) -> None:
    engine = PretendEngine(max_num_batched_tokens=8)
    request = engine.request(range(20), params(0, n=n, prompt_logprobs=1))
    engine.drain()
    for sequence in request.sequences:
        assert (engine.tokens[sequence], engine.finished[sequence]) == ([], FinishReason.LENGTH)
    assert len(engine.prompt_logprobs[request.sequences[0]]) == 20
    assert not any(row.samples for plan in engine.plans for row in plan.rows)


def test_a_stop_string_found_outside_ends_the_sequence_and_nothing_beyond_it_is_cached() -> None:
    engine = PretendEngine(block_size=B)
    request = engine.request(range(6), params(40, n=2))
    first, second = request.sequences
    while len(engine.tokens.get(first, [])) < 2:
        engine.step()
    assert engine.scheduler.finish_sequence(first, FinishReason.STOP)
    assert not engine.scheduler.finish_sequence(first, FinishReason.STOP)
    # 6 prompt tokens and 2 drawn ones; the second is not computed, so the second block is not full.
    assert set(engine.kv.cache.hashes()) == {first.block_hashes[0]}
    engine.finished[first] = FinishReason.STOP
    engine.drain()
    expected = solo_outcome(engine.model, request, 1, max_model_len=256)
    assert (engine.tokens[second], engine.finished[second]) == expected


def test_cancel_gives_everything_back_in_every_state() -> None:
    engine = PretendEngine(num_blocks=13, block_size=B, max_num_batched_tokens=8, watermark_ratio=0.0)
    for num_steps, n in itertools.product(range(12), (1, 2, 4)):
        request = engine.request(range(20), params(4, n=n))
        other = engine.request([7] * 9, params(8))
        for _ in range(num_steps):
            engine.step()
        engine.cancel(request)
        assert engine.cancel(request) == []
        assert all(sequence in engine.finished for sequence in request.sequences)
        engine.check_solo_after_drain(other)
    assert engine.scheduler.cancel(RequestId("unknown")) == []


def test_cancel_while_the_step_is_in_flight_drops_its_result() -> None:
    engine = PretendEngine(block_size=B)
    request, other = engine.request(range(7), params(8, n=2)), engine.request([7] * 9, params(8))
    engine.step()
    engine.step(between=lambda: engine.cancel(request))
    assert engine.finished[request.sequences[0]] is FinishReason.CANCELLED
    engine.check_solo_after_drain(other)


def test_copies_of_a_last_step_leave_no_block_behind() -> None:
    engine = PretendEngine(block_size=B)
    engine.check_solo_after_drain(engine.request(range(6), params(2, n=2)))
    assert engine.kv.copies() == ()
    assert engine.scheduler.kv_stats().num_used_blocks == 0


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_publishes_nothing() -> None:
    engine = PretendEngine(block_size=B, max_num_seqs=2, max_num_batched_tokens=32)
    hit = [engine.request([index] * 9, params(4, n=2 if index else 1)) for index in range(2)]
    waiting = engine.request([5] * 9, params(4))
    engine.step(fails=True)
    for request in hit:
        assert {engine.finished[sequence] for sequence in request.sequences} == {FinishReason.ERROR}
    assert engine.kv.cache.hashes() == ()
    engine.check_solo_after_drain(waiting)


def test_a_row_without_its_token_ends_only_its_request() -> None:
    engine = PretendEngine()
    broken, other = engine.request([1, 2], params(4, n=2)), engine.request([3, 4], params(4))
    plan = engine.scheduler.plan()
    results = [
        RowResult(None) if row.sequence.request is broken else result
        for row, result in zip(plan.rows, engine.model.run(plan), strict=True)
    ]
    engine.take(engine.scheduler.commit(plan, results))
    assert {engine.finished[sequence] for sequence in broken.sequences} == {FinishReason.ERROR}
    engine.check_solo_after_drain(other)


def test_results_that_do_not_match_the_plan_are_refused() -> None:
    engine = PretendEngine()
    engine.request([1, 2])
    with pytest.raises(InternalError, match="0 results for 1 rows"):
        engine.scheduler.commit(engine.scheduler.plan(), [])


def test_hundreds_of_mixed_requests_leak_no_block() -> None:
    engine = PretendEngine(num_blocks=30, block_size=B, eos_token_ids=(1, 2))
    for index in range(300):
        request = engine.request(
            range(index % 11, index % 11 + 1 + index % 23), params(1 + index % 13, n=1 + (index % 5 == 0))
        )
        kind = index % 4
        engine.step(fails=index % 50 == 49)
        if kind == 1:
            engine.cancel(request)
        elif kind == 2:
            for _ in range(3):
                engine.step()
            engine.cancel(request)
        elif kind == 3:
            engine.step()
            sequence = request.sequences[0]
            if engine.scheduler.finish_sequence(sequence, FinishReason.STOP):
                engine.finished[sequence] = FinishReason.STOP
    engine.drain()
    engine.check_solo_after_drain(engine.request([7] * (29 * B), params(1)))
    stats = engine.scheduler.kv_stats()
    assert (stats.num_used_blocks, stats.num_free_blocks) == (0, 29)


# --- prompt logprobs --------------------------------------------------------------------------------------------------


def test_prompt_logprobs_are_whole_cold_cached_chunked_and_preempted() -> None:
    engine = PretendEngine(num_blocks=13, block_size=B, max_num_batched_tokens=8, watermark_ratio=0.0)
    asked = params(8, prompt_logprobs=2, n=2)
    answers = []
    for round_ in range(3):
        crowd = [engine.request([index] * 5, params(16), priority=index - 3) for index in range(2 * round_)]
        request = engine.request(range(19), asked)
        for _ in range(2):
            engine.step()
        crowd += [engine.request([index] * 5, params(16), priority=-1) for index in range(2 * round_)]
        engine.check_solo_after_drain(request, *crowd)
        answers.append(engine.prompt_logprobs[request.sequences[0]])
        assert request.sequences[1] not in engine.prompt_logprobs
        assert request.num_cached_tokens == 0
    assert engine.scheduler.counters.num_preemptions > 0
    first = answers[0]
    assert len(first) == 19
    assert first[0].chosen is None
    chosen = [item.chosen.token_id for item in first[1:] if item.chosen is not None]
    assert chosen == list(range(1, 19))
    assert answers[1:] == [first, first]
