"""Sequences that give way or fork, and come out with the answer they would have had alone."""

from __future__ import annotations

import pytest

from naru_worker.core.request import FinishReason, SequenceState
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.testing import solo_outcome
from naru_worker.core.testing_engine import PretendEngine

B = 4


def params(max_tokens: int | None = 6, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_preempted_requests_resume_with_the_right_answer(n: int, enable_prefix_caching: bool) -> None:
    engine = PretendEngine(num_blocks=13, block_size=B, enable_prefix_caching=enable_prefix_caching)
    length = 1 if n == 2 else 4
    requests = [
        engine.request([index * 10 + k for k in range(2 * B + 3)], params(length * B, ignore_eos=True, n=n))
        for index in range(4)
    ]
    engine.check_solo_after_drain(*requests)
    assert engine.scheduler.counters.num_preemptions > 0
    assert all(len(engine.tokens[s]) == length * B for request in requests for s in request.sequences)


def test_one_request_preempted_again_and_again_still_ends_right() -> None:
    engine = PretendEngine(num_blocks=13, block_size=B, watermark_ratio=0.0)
    victim = engine.request(range(2 * B), params(6 * B), priority=9)
    others = []
    for index in range(8):
        others.append(engine.request([index] * (2 * B), params(3 * B)))
        for _ in range(7):
            engine.step()
    engine.check_solo_after_drain(victim, *others)
    assert victim.sequences[0].num_preemptions >= 2


def test_the_newest_of_the_least_important_gives_way() -> None:
    engine = PretendEngine(num_blocks=9, block_size=B, watermark_ratio=0.0)
    requests = {
        name: engine.request([index] * B, params(12), priority=priority, request_id=name)
        for index, (name, priority) in enumerate((("low-old", 1), ("high", 0), ("low-new", 1)))
    }
    while not engine.step().preempted:
        pass
    assert [s.request.request_id for s in engine.plans[-1].preempted] == ["low-new"]
    assert requests["low-new"].sequences[0].state is SequenceState.WAITING
    engine.check_solo_after_drain(*requests.values())


def test_a_sequence_that_outgrows_the_pool_alone_ends_with_length() -> None:
    engine = PretendEngine(num_blocks=5, block_size=B, max_model_len=256)
    request = engine.request(range(6), params(None))
    other = engine.request([1, 2, 3], params(3))
    engine.drain()
    (sequence,) = request.sequences
    expected, _ = solo_outcome(engine.model, request, 0, max_model_len=4 * B + 1)
    assert (engine.tokens[sequence], engine.finished[sequence]) == (expected, FinishReason.LENGTH)
    assert [s for plan in engine.plans for s in plan.ended] == [sequence]
    engine.check_solo(other)


def test_two_sequences_that_both_outgrow_the_pool_both_end() -> None:
    engine = PretendEngine(num_blocks=5, block_size=B, max_model_len=256, watermark_ratio=0.0)
    requests = [engine.request([index] * 5, params(None)) for index in range(2)]
    engine.drain()
    for request in requests:
        expected, _ = solo_outcome(engine.model, request, 0, max_model_len=4 * B + 1)
        assert engine.tokens[request.sequences[0]] == expected


def test_a_waiting_sequence_that_fits_no_more_ends_and_lets_the_next_one_in() -> None:
    engine = PretendEngine(num_blocks=5, block_size=B)
    long, short = engine.request(range(16), params(9)), engine.request(range(3))
    long.sequences[0].token_ids.append(1)
    assert engine.step().ended == (long.sequences[0],)
    assert engine.finished[long.sequences[0]] is FinishReason.LENGTH
    engine.check_solo_after_drain(short)


def test_a_crowd_in_a_small_pool_comes_out_whole_with_a_third_cancelled() -> None:
    engine = PretendEngine(num_blocks=60, block_size=B, max_num_seqs=32, max_num_batched_tokens=64)
    requests = [
        engine.request(range(index % 7, index % 7 + 3 + index % 17), params(5 + index % 19, n=1 + index % 2))
        for index in range(64)
    ]
    for step in range(10_000):
        if not engine.scheduler.has_work:
            break
        engine.step()
        if step % 2 and step // 2 * 3 < 64:
            engine.cancel(requests[step // 2 * 3])
    engine.drain()
    assert engine.scheduler.counters.num_preemptions > 0
    for request in requests:
        if FinishReason.CANCELLED not in {engine.finished[sequence] for sequence in request.sequences}:
            engine.check_solo(request)
    assert len(engine.finished) == 96


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B])
def test_choices_fork_the_prompt_and_compute_only_its_last_token(length: int) -> None:
    engine = PretendEngine(block_size=B, enable_prefix_caching=False)
    request = engine.request(range(length), params(9, n=3))
    engine.check_solo_after_drain(request)
    computed = sum(row.num_tokens for plan in engine.plans for row in plan.rows)
    assert computed == length + 2 + 3 * 8
    assert len({tuple(engine.tokens[sequence]) for sequence in request.sequences}) == 3


def test_choices_without_a_place_wait_for_one() -> None:
    engine = PretendEngine(block_size=B, max_num_seqs=1)
    request = engine.request(range(6), params(4, n=3))
    engine.check_solo_after_drain(request)


def test_choices_preempted_between_fork_and_first_token_are_right() -> None:
    engine = PretendEngine(num_blocks=6, block_size=B, watermark_ratio=0.0)
    other = engine.request([9] * 6, params(6))
    request = engine.request(range(5), params(4, n=2))
    engine.check_solo_after_drain(other, request)
    assert sum(sequence.num_preemptions for sequence in request.sequences) > 0


def test_an_elder_that_ends_at_once_leaves_its_siblings_the_prompt() -> None:
    engine = PretendEngine(block_size=B, eos_token_ids=tuple(range(0, 50, 2)))
    for start in range(20):
        engine.check_solo_after_drain(engine.request(range(start, start + 6), params(8, n=3)))


def test_siblings_compute_the_prompt_themselves_when_their_elder_is_ended_before() -> None:
    engine = PretendEngine(max_num_batched_tokens=8, max_num_seqs=2)
    request = engine.request(range(20), params(4, n=3))
    engine.step()
    elder = request.sequences[0]
    assert engine.scheduler.finish_sequence(elder, FinishReason.STOP)
    engine.drain()
    for sequence in request.sequences[1:]:
        expected = solo_outcome(engine.model, request, sequence.index, max_model_len=256)
        assert (engine.tokens[sequence], engine.finished[sequence]) == expected
