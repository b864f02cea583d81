"""Drafts in plans: output equal to the run without them, at nobody's expense, and nothing kept of wrong guesses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_worker.core.draft_choice import DraftReason
from naru_worker.core.request import FinishReason, Request, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.step import RowResult
from naru_worker.core.testing_engine import PretendEngine


def repeating(num_drawn: int = 1, **options: Any) -> PretendEngine:
    """An engine whose model says the same few tokens over and over."""
    return PretendEngine(max_draft_tokens=8, num_drawn=num_drawn, **options)


def reasons(engine: PretendEngine) -> dict[str, int]:
    return engine.scheduler.counters.draft_reasons


def test_a_text_that_repeats_itself_takes_a_few_steps() -> None:
    engine = repeating()
    request = engine.request(range(5), SamplingParams(max_tokens=100))
    engine.check_solo_after_drain(request)
    counters = engine.scheduler.counters
    assert counters.generated_tokens == 100
    assert counters.num_steps < 25
    assert counters.drafted_tokens == counters.accepted_tokens == 100 - counters.num_steps
    assert counters.prefilled_tokens == 5
    assert reasons(engine)[DraftReason.PAYS.value] > 10
    assert request.sequences[0].draft_source is None, "what ended keeps no index"


def test_wrong_guesses_cost_no_token_and_leave_no_block() -> None:
    engine = repeating(num_drawn=2, num_blocks=200)
    requests = [engine.request(range(i, i + 5), SamplingParams(max_tokens=80, n=2)) for i in range(3)]
    engine.check_solo_after_drain(*requests)
    counters = engine.scheduler.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.generated_tokens == 6 * 80
    # Each block the cache offers holds what its sequence really said.
    known = set()
    for request in requests:
        for sequence in request.sequences:
            known.update(sequence.block_hashes)
            assert len(sequence.token_ids) == 85
            assert sequence.block_hashes == engine.kv._hashes(sequence, len(sequence.block_hashes))
    assert set(engine.kv.cache.hashes()) <= known


def test_a_text_that_repeats_nothing_has_no_drafts() -> None:
    engine = PretendEngine(max_draft_tokens=8, vocab_size=30_000)
    engine.check_solo_after_drain(engine.request(range(9), SamplingParams(max_tokens=60)))
    assert engine.scheduler.counters.drafted_tokens == 0
    assert reasons(engine) == {reason.value: 59 * (reason is DraftReason.NO_MATCH) for reason in DraftReason}


def test_poor_odds_end_drafts_and_good_ones_bring_them_back() -> None:
    engine = repeating(num_blocks=400, max_model_len=1000, num_drawn=6)
    request = engine.request(range(5), SamplingParams(max_tokens=600))
    while request.sequences[0].num_output_tokens < 300:
        engine.step()
    drafted, poor = engine.scheduler.counters.drafted_tokens, reasons(engine)[DraftReason.POOR_ODDS.value]
    assert poor > 150, "a guess is right once in six times: rows cost more than they give"
    assert drafted < 150
    engine.model.num_drawn = 1  # from here on the text repeats itself
    engine.drain()
    assert engine.scheduler.counters.accepted_tokens > 200


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10, 11])
def test_no_draft_is_longer_than_what_may_still_be_said(max_tokens: int) -> None:
    engine = repeating(max_model_len=18)
    request = engine.request([0] * 7, SamplingParams(max_tokens=max_tokens))
    unlimited = engine.request([0] * 8, SamplingParams(max_tokens=None))
    engine.check_solo_after_drain(request, unlimited)
    assert engine.scheduler.counters.drafted_tokens == engine.scheduler.counters.accepted_tokens


def test_an_end_among_right_guesses_ends_there() -> None:
    engine = repeating(eos_token_ids=(0,))
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine.check_solo_after_drain(engine.request([0] * 6, params))
    # The guess is right, and it is the end: nothing behind it counts.
    ending = SamplingParams(max_tokens=50, min_tokens=11)
    request = engine.request([0, 0, 0, 1, 0, 0, 0, 1], ending)
    engine.check_solo_after_drain(request)
    assert engine.finished[request.sequences[0]] is FinishReason.STOP
    assert request.sequences[0].num_output_tokens == 12


def test_drafts_take_what_prompts_and_blocks_leave_over_and_preempt_nobody() -> None:
    budget = repeating(max_num_seqs=2, max_num_batched_tokens=6, num_blocks=100)
    long = SamplingParams(max_tokens=60)
    first = budget.request([0] * 6, long)
    for _ in range(10):
        budget.step()
    second = budget.request(range(40), long)
    while second.sequences[0].num_output_tokens == 0:
        plan = budget.step()
        assert sum(row.num_tokens for row in plan.rows if row.sequence in second.sequences) == 5
        assert all(not row.drafts for row in plan.rows), "the prompt takes all there is"
    budget.check_solo_after_drain(first, second)
    assert reasons(budget)[DraftReason.NO_ROOM.value] > 0

    # A pool that the two just fill: drafts come to an end with it, and neither has to go.
    tight = repeating(max_num_seqs=2, num_blocks=2 * 8 + 1, watermark_ratio=0)
    requests = [tight.request([number] * 5, SamplingParams(max_tokens=27)) for number in range(2)]
    tight.check_solo_after_drain(*requests)
    assert tight.scheduler.counters.num_preemptions == 0
    assert tight.scheduler.counters.accepted_tokens > 20


def test_a_large_batch_does_not_look_for_guesses() -> None:
    engine = repeating(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=600)
    requests = [engine.request([number] * 4, SamplingParams(max_tokens=10)) for number in range(33)]
    engine.check_solo_after_drain(*requests)
    assert engine.scheduler.counters.drafted_tokens == 0
    assert reasons(engine)[DraftReason.LARGE_BATCH.value] == 9


def test_blocks_behind_a_stop_string_are_not_cached() -> None:
    """The text is looked at after the commit: what it may turn out to end before waits for the next step."""
    engine = repeating(num_blocks=100)
    params = SamplingParams(max_tokens=60, stop=("never",))
    request = engine.request([0] * 6, params)
    sequence = request.sequences[0]
    size = engine.kv.block_size
    num_known = 0
    while sequence.state.value != "finished":
        plan = engine.step()
        num_known = plan.rows[0].start + plan.rows[0].num_known_tokens
        if sequence.state.value == "running":
            hashes = engine.kv._hashes(sequence, num_known // size)
            assert len(engine.kv.cache.lookup(hashes)) == num_known // size, "a block was left out"
            assert len(engine.kv.cache) == num_known // size, "a block came too early"
    assert engine.scheduler.counters.accepted_tokens > 30


def test_a_result_without_a_token_among_the_drafts_ends_the_request() -> None:
    engine = repeating()
    request = engine.request([0] * 6, SamplingParams(max_tokens=60))
    while True:
        plan = engine.scheduler.plan()
        results = engine.model.run(plan)
        if plan.rows[0].drafts:
            break
        engine.take(engine.scheduler.commit(plan, results))
    with pytest.raises(Exception, match="results for"):
        engine.scheduler.commit(plan, [dataclasses.replace(results[0], drafted=())])
    broken = dataclasses.replace(results[0], drafted=(RowResult(None),) * len(plan.rows[0].drafts))
    engine.take(engine.scheduler.commit(plan, [broken]))
    engine.scheduler.check()
    assert engine.finished[request.sequences[0]] is FinishReason.ERROR
    engine.drain()


def test_a_negative_number_of_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens"):
        SchedulerConfig(1, 1, 1, max_draft_tokens=-1)


class _Matcher:
    """A grammar that lets everything pass."""

    failure = ""
    param = "response_format"

    def advance(self, token_id: int) -> object:
        from naru_worker.core.token_matcher import MatchState

        return MatchState.OPEN


def test_structured_text_and_beams_have_no_drafts() -> None:
    engine = repeating(num_blocks=200)
    request = Request(
        RequestId("g"),
        (0,) * 6,
        SamplingParams(max_tokens=20),
        7,
        100,
        matchers=(_Matcher(),),  # type: ignore[arg-type]
    )
    engine.scheduler.add(request)
    engine.request([0] * 6, SamplingParams(max_tokens=10, beam_width=2))
    engine.drain()
    assert engine.scheduler.counters.drafted_tokens == 0
    assert len(engine.tokens[request.sequences[0]]) == 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([1, 4, 16]),
)
def test_any_mixture_equals_its_solo_runs(
    asks: list[tuple[int, int, int]], num_drawn: int, max_draft_tokens: int, block_size: int
) -> None:
    engine = PretendEngine(
        max_draft_tokens=max_draft_tokens,
        num_drawn=num_drawn,
        block_size=block_size,
        num_blocks=96 // block_size + 2,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    requests = [
        engine.request(range(begin, begin + length), SamplingParams(max_tokens=max_tokens))
        for begin, length, max_tokens in asks
    ]
    engine.check_solo_after_drain(*requests)
