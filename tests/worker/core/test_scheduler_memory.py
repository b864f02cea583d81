"""A scheduler whose KV memory others hold: who waits, who gives way, and that nobody spins."""

from __future__ import annotations

import pytest
from growth import Grants

from naru_proto.errors import ContextLengthExceeded
from naru_worker.core.prompt_marks import PromptMarks
from naru_worker.core.request import FinishReason, SequenceState
from naru_worker.core.route_marks import KeyChanges
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.testing_engine import PretendEngine

B = 4


def params(max_tokens: int | None = 6, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]


def make_engine(growth: Grants, num_blocks: int = 40, **options: object) -> PretendEngine:
    return PretendEngine(num_blocks=num_blocks, block_size=B, growth=growth, **options)  # type: ignore[arg-type]


def step_until_starved(engine: PretendEngine) -> None:
    for _ in range(200):
        if engine.step().is_starved:
            return
    raise AssertionError("it never starves")


def test_a_model_takes_memory_as_it_needs_it() -> None:
    growth = Grants(plenty=9, most=9)
    engine = make_engine(growth)
    request = engine.request(range(2 * B), params(4 * B))
    assert engine.kv.num_committed_chunks == 1
    engine.check_solo_after_drain(request)
    # 24 tokens less the last, which is drawn but not computed: 6 blocks, and 3 are in the floor.
    assert engine.kv.num_committed_chunks == 2
    assert all(num_chunks == 1 and not is_urgent for num_chunks, is_urgent in growth.asked)


def test_a_prompt_waits_while_memory_is_refused_and_runs_when_it_is_given() -> None:
    growth = Grants()
    engine = make_engine(growth)
    request = engine.request(range(5 * B), params())
    for _ in range(5):
        plan = engine.step()
        assert (plan.is_starved, plan.rows, plan.preempted) == (True, (), ())
    assert engine.scheduler.first_waiting is request
    growth.most = 1
    engine.check_solo_after_drain(request)


def test_a_sequence_that_outgrows_what_it_can_get_waits_without_holding_a_block() -> None:
    growth = Grants()
    engine = make_engine(growth)
    request = engine.request(range(2 * B), params(4 * B))
    step_until_starved(engine)
    (sequence,) = request.sequences
    assert sequence.state is SequenceState.WAITING
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks == 3
    num_tokens = len(sequence.token_ids)
    for _ in range(5):
        assert engine.step().is_starved
    assert (len(sequence.token_ids), sequence.num_preemptions) == (num_tokens, 1)
    growth.most = 1
    engine.check_solo_after_drain(request)


def test_one_that_outgrows_the_most_there_can_be_ends_by_length() -> None:
    growth = Grants(most=9)
    engine = make_engine(growth, num_blocks=8)
    request = engine.request(range(2 * B), params(None))
    engine.drain()
    (sequence,) = request.sequences
    assert engine.finished[sequence] is FinishReason.LENGTH
    # 7 blocks hold 28 tokens; the 29th is drawn.
    assert len(sequence.token_ids) == 7 * B + 1


def test_what_fits_the_most_is_taken_though_it_does_not_fit_now() -> None:
    engine = make_engine(Grants(), num_blocks=8)
    engine.request(range(7 * B - 1), params(1))
    with pytest.raises(ContextLengthExceeded, match="the KV cache has 7 blocks"):
        engine.request([1] * (7 * B + 1), params(1))


def test_running_sequences_give_way_only_after_memory_was_asked_for_urgently() -> None:
    growth = Grants(floor_chunks=2)
    engine = make_engine(growth, watermark_ratio=0.0)
    older, newer = (engine.request([index] * B, params(6 * B)) for index in range(2))
    while not (plan := engine.step()).preempted:
        pass
    assert [s.request for s in plan.preempted] == [newer]
    assert growth.asked[-2:] == [(1, False), (1, True)]
    assert engine.scheduler.num_running == 1
    growth.most = 9
    engine.check_solo_after_drain(older, newer)


def test_a_smaller_request_runs_once_the_starved_one_before_it_has_ended() -> None:
    engine = make_engine(Grants())
    large = engine.request(range(5 * B), params())
    small = engine.request(range(50, 50 - B, -1)[1:], params())
    assert engine.step().is_starved
    engine.cancel(large)
    engine.check_solo_after_drain(small)


def test_two_models_that_take_turns_with_one_chunk_both_come_to_an_end() -> None:
    """Each can only grow by what the other gives up; whoever is starved holds nothing."""
    growths = [Grants(), Grants()]
    engines = [make_engine(growth, revision=name) for growth, name in zip(growths, "ab", strict=True)]
    requests = [engine.request(range(2 * B), params(4 * B)) for engine in engines]
    num_spare = 1
    for _ in range(200):
        for engine, growth, other in zip(engines, growths, reversed(engines), strict=True):
            num_spare += len(other.shrink(9))
            growth.most = num_spare
            if engine.scheduler.has_work:
                engine.step()
            num_spare = growth.most
    for engine, request in zip(engines, requests, strict=True):
        assert not engine.scheduler.has_work
        engine.check_solo(request)


def test_content_that_was_given_up_is_not_hit_and_its_removal_is_told() -> None:
    growth = Grants(plenty=9, most=9)
    engine = make_engine(growth)
    marks = PromptMarks({index: (b"key %d" % index,) for index in range(6)})
    first = engine.request(range(6 * B), params(1), marks=marks)
    engine.check_solo_after_drain(first)
    assert len(engine.kv.cache) == 6
    held = engine.kv.cache.marks
    assert set(held.take().added) == {b"key %d" % index for index in range(6)}
    assert engine.shrink(9) == [1]
    assert held.take() == KeyChanges((), (b"key 3", b"key 4", b"key 5"))
    assert set(engine.kv.cache.hashes()) == set(first.sequences[0].block_hashes[:3])
    again = engine.request(range(6 * B), params(1))
    engine.check_solo_after_drain(again)
    assert again.num_cached_tokens == 3 * B


def test_the_watermark_is_a_share_of_the_memory_there_is() -> None:
    growth = Grants(chunk_blocks=10)
    engine = make_engine(growth, num_blocks=1000, watermark_ratio=0.1)
    running = engine.request(range(B), params(2))
    engine.step()
    # Nine blocks are there and two will be held: a prompt of six leaves one. A tenth of the most would be 100.
    waiting = engine.request(range(6 * B - 1, -1, -1), params(1))
    plan = engine.step()
    assert {row.sequence.request for row in plan.rows} == {running, waiting}
