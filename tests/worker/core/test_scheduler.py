"""The scheduler with a model whose tokens tell whether it read the right slots: every answer equals its solo run."""

from __future__ import annotations

import itertools

import pytest

from naru_proto.errors import InternalError
from naru_worker.core.kv_manager import NO_MATCH
from naru_worker.core.request import FinishReason, Request, RequestId, SequenceState
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.step import RowResult
from naru_worker.core.testing import solo_outcome
from naru_worker.core.testing_engine import PretendEngine

B = 4


def params(max_tokens: int | None = 6, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 5 * B + 3])
def test_an_answer_is_the_same_cold_and_cached(length: int) -> None:
    engine = PretendEngine(block_size=B)
    for run in range(3):
        request = engine.request(range(length))
        engine.check_solo_after_drain(request)
        cached = (length - 1 if length % B == 0 else length // B * B) if run else 0
        assert request.num_cached_tokens == cached
    counters = engine.scheduler.counters
    assert counters.prefix_query_tokens == 3 * length
    assert counters.prefix_hit_tokens == 2 * request.num_cached_tokens


@pytest.mark.parametrize("num_shared", [0, B - 1, B, 2 * B, 2 * B + 1])
def test_prompts_that_share_a_beginning_share_its_blocks_only(num_shared: int) -> None:
    engine = PretendEngine(block_size=B)
    first = engine.request([*range(num_shared), 40, 41, 42, 43, 44])
    engine.drain()
    second = engine.request([*range(num_shared), 30, 31, 32, 33, 34])
    engine.check_solo_after_drain(first, second)
    assert second.num_cached_tokens == num_shared // B * B


def test_equal_prompts_at_the_same_time_compute_their_prefix_once() -> None:
    engine = PretendEngine(block_size=B, max_num_batched_tokens=64, num_blocks=200)
    requests = [engine.request([*range(40), 40 + index]) for index in range(8)]
    engine.check_solo_after_drain(*requests)
    assert [request.num_cached_tokens for request in requests] == [0] + [40] * 7
    assert engine.scheduler.counters.prefilled_tokens == 41


def test_a_sequence_does_not_wait_for_a_less_important_one_to_compute_its_prefix() -> None:
    engine = PretendEngine(block_size=B, max_num_batched_tokens=16)
    engine.request(range(40), priority=1)
    engine.step()
    urgent = engine.request(range(40), priority=0)
    plan = engine.step()
    assert urgent.num_cached_tokens == 16
    assert urgent.sequences[0] in {row.sequence for row in plan.rows}
    engine.check_solo_after_drain(urgent)


@pytest.mark.parametrize("other", [{"adapter": "lora"}, {"cache_salt": b"tenant"}])
def test_adapters_and_tenants_do_not_share(other: dict[str, str]) -> None:
    engine = PretendEngine(block_size=B)
    for options in ({}, other, {}, other):
        request = engine.request(range(13), **options)  # type: ignore[arg-type]
        engine.check_solo_after_drain(request)
    assert engine.scheduler.counters.prefix_hit_tokens == 24


def test_a_request_may_skip_the_cache() -> None:
    engine = PretendEngine(block_size=B)
    engine.check_solo_after_drain(engine.request(range(13)))
    request = engine.request(range(13), skip_prefix_cache=True)
    engine.check_solo_after_drain(request)
    assert request.num_cached_tokens == 0


def test_new_weights_void_the_cache_and_end_what_runs() -> None:
    engine = PretendEngine(block_size=B)
    engine.check_solo_after_drain(engine.request(range(13)))
    running, waiting = engine.request(range(13), params(n=2)), engine.request(range(7))
    engine.step()
    engine.take(engine.scheduler.reset())
    for sequence in (*running.sequences, *waiting.sequences):
        assert engine.finished[sequence] is FinishReason.CANCELLED
    request = engine.request(range(13))
    engine.check_solo_after_drain(request)
    assert (request.num_cached_tokens, engine.kv.epoch) == (0, 1)


# --- chunks and the budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 16, 64])
def test_the_answer_does_not_depend_on_the_chunks(budget: int) -> None:
    engine = PretendEngine(block_size=B, max_num_batched_tokens=budget, max_num_seqs=1)
    request = engine.request(range(43))
    engine.check_solo_after_drain(request)
    rows = [row for plan in engine.plans for row in plan.rows]
    assert [row.samples for row in rows] == [False] * (-(-43 // budget) - 1) + [True] * 8


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    engine = PretendEngine(max_num_batched_tokens=8, num_blocks=200)
    short = [engine.request([index, 1], params(40)) for index in range(3)]
    engine.step()
    long = engine.request(range(50), params(2))
    for _ in range(10):
        plan = engine.step()
        assert [row.num_tokens for row in plan.rows] == [1, 1, 1, 5]
    engine.check_solo_after_drain(*short, long)


def test_an_important_long_prompt_leaves_the_decodes_behind_it_their_place() -> None:
    engine = PretendEngine(max_num_batched_tokens=8, num_blocks=200, long_prefill_chunk_tokens=8)
    short = [engine.request([index], params(9), priority=1) for index in range(3)]
    engine.step()
    long = engine.request([1] * 50, params(2), priority=0)
    for _ in range(5):
        assert [row.num_tokens for row in engine.step().rows] == [1, 1, 1, 5]
    engine.check_solo_after_drain(long, *short)


def test_decodes_leave_what_they_do_not_need_to_newcomers() -> None:
    engine = PretendEngine(max_num_batched_tokens=4, max_num_seqs=4)
    decoding = [engine.request([index], params(9)) for index in range(3)]
    engine.step()
    newcomer = engine.request([7])
    assert [row.num_tokens for row in engine.step().rows] == [1, 1, 1, 1]
    engine.check_solo_after_drain(newcomer, *decoding)


def test_short_prompts_are_not_held_up_by_long_ones() -> None:
    engine = PretendEngine(max_num_batched_tokens=16, num_blocks=400)
    long = [engine.request([index] * 200, params(1)) for index in range(3)]
    engine.step()
    short = engine.request([7, 8, 9], params(1))
    plan = engine.step()
    assert short.sequences[0] in {row.sequence for row in plan.rows}
    assert plan.num_tokens == 16
    engine.check_solo_after_drain(*long, short)


def test_a_long_prompt_alone_takes_the_whole_budget() -> None:
    engine = PretendEngine(max_num_batched_tokens=16, num_blocks=100)
    engine.request([1] * 100, params(1))
    assert [engine.step().num_tokens for _ in range(6)] == [16] * 6


def test_a_running_prompt_gives_way_to_a_more_important_one() -> None:
    engine = PretendEngine(max_num_batched_tokens=8, num_blocks=200)
    long = engine.request([1] * 60, params(2), priority=1)
    engine.step()
    urgent = engine.request([2] * 30, params(2), priority=0)
    for _ in range(3):
        assert [(row.sequence.request, row.num_tokens) for row in engine.step().rows] == [(urgent, 8)]
    assert [(row.sequence.request, row.num_tokens) for row in engine.step().rows] == [(urgent, 6), (long, 2)]
    engine.check_solo_after_drain(long, urgent)


def test_prompts_held_back_for_one_that_finds_no_room_go_on_even_by_preemption() -> None:
    engine = PretendEngine(max_num_batched_tokens=9, num_blocks=31, block_size=1, long_prefill_chunk_tokens=4)
    first, done, second = (
        engine.request([index] * length, params(max_tokens), priority=1)
        for index, (length, max_tokens) in enumerate(((6, 4), (3, 1), (4, 4)))
    )
    assert [row.num_tokens for row in engine.step().rows] == [4, 3, 2]
    newcomer = engine.request([5] * 5, params(2), priority=0)
    # Somebody outside takes all free blocks, so that neither the newcomer nor those held back for it find any.
    num_free = engine.kv.num_free_blocks
    (outsider,) = Request(RequestId("outsider"), (9,) * num_free, params(), seed=0, arrival=0).sequences
    assert engine.kv.admit(outsider, NO_MATCH, num_free, 0)
    plan = engine.scheduler.plan()
    assert [(row.sequence.request, row.num_tokens) for row in plan.rows] == [(first, 2)]
    assert [sequence.request for sequence in plan.preempted] == [second]
    engine.take(engine.scheduler.commit(plan, engine.model.run(plan)))
    engine.kv.free(outsider)
    engine.check_solo_after_drain(first, done, second, newcomer)


def test_more_important_requests_go_first_and_equal_ones_as_they_came() -> None:
    engine = PretendEngine(max_num_seqs=1, max_num_batched_tokens=8)
    order = [
        engine.request([1], params(1), priority=priority, request_id=name)
        for name, priority in (("c", 1), ("a", 0), ("d", 1), ("b", 0))
    ]
    engine.drain()
    ended = [sequence.request.request_id for sequence in engine.finished]
    assert ended == ["a", "b", "c", "d"]
    assert len(order) == 4


def test_a_prompt_waits_for_the_blocks_that_a_running_one_will_need() -> None:
    engine = PretendEngine(num_blocks=11, block_size=B, max_num_batched_tokens=8, watermark_ratio=0.0)
    requests = [engine.request([1] * 30, params(1))]
    engine.step()
    requests.append(engine.request([2] * 12, params(1)))
    for _ in range(3):
        assert [row.sequence.request for row in engine.step().rows] == requests[:1]
    engine.check_solo_after_drain(*requests)
    assert engine.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("watermark_ratio", "is_let_in"), [(0.0, True), (0.19, True), (0.21, False)])
def test_admission_leaves_the_watermark_free_while_others_run(
    watermark_ratio: float, is_let_in: bool, at_once: bool
) -> None:
    engine = PretendEngine(num_blocks=11, block_size=B, max_num_batched_tokens=64, watermark_ratio=watermark_ratio)
    requests = [engine.request([1] * 22, params(2))]
    if not at_once:
        engine.step()
    requests.append(engine.request([2] * 8, params(1)))
    # 6 and 2 of 10 blocks: 2 are left.
    assert len(engine.step().rows) == (2 if is_let_in else 1)
    engine.check_solo_after_drain(*requests)
    engine.check_solo_after_drain(engine.request([3] * 40, params(1)))


def test_no_more_sequences_run_than_allowed() -> None:
    engine = PretendEngine(max_num_seqs=3)
    requests = [engine.request([index, 2], params(4, n=2)) for index in range(4)]
    engine.step()
    assert engine.scheduler.num_running <= 3
    engine.check_solo_after_drain(*requests)
    assert max(len(plan.rows) for plan in engine.plans) == 3


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
