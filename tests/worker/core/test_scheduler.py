"""The scheduler with a model whose tokens tell whether it read the right slots: every answer equals its solo run."""

from __future__ import annotations

import pytest

from naru_worker.core.kv_manager import NO_MATCH
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.sampling import SamplingParams
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
