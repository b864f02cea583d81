"""How many drafts pay: the best of all distributions, none where rows cost too much, and what a row costs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.draft_choice import MIN_GAIN, DraftReason, choose_drafts, least_chance
from naru_worker.core.row_costs import EXPECTED_SLOPE, MAX_DEVIATION, RowCosts


def line(base_s: float, row_s: float) -> RowCosts:
    """Costs that have seen this line often."""
    costs = RowCosts()
    for step in range(400):
        rows = 1 + step % 9
        costs.observe(rows, base_s + row_s * rows)
    return costs


def falling(shares: list[float]) -> list[float]:
    return list(itertools.accumulate(shares, lambda one, other: one * other))


odds = st.lists(st.lists(st.floats(0.05, 0.99), min_size=1, max_size=4).map(falling), min_size=1, max_size=3)


@given(odds, st.integers(1, 4), st.floats(0.0, 2.0), st.floats(0.01, 1.0), st.integers(0, 8))
def test_no_other_distribution_gives_more_tokens_a_second(
    chances: list[list[float]], extra: int, base_s: float, row_s: float, max_rows: int
) -> None:
    costs = line(base_s, row_s)
    num_sequences = len(chances) + extra - 1
    choice = choose_drafts(chances, num_sequences, num_sequences, costs, max_rows)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = num_sequences + sum(sum(each[:count]) for each, count in zip(chances, counts, strict=True))
        return tokens / costs.step_s(num_sequences + sum(counts))

    all_counts = itertools.product(*(range(len(each) + 1) for each in chances))
    best = max(rate(counts) for counts in all_counts if sum(counts) <= max_rows)
    none = rate((0,) * len(chances))
    if choice.reason is DraftReason.PAYS:
        assert rate(choice.num_drafts) == pytest.approx(best)
        assert best > MIN_GAIN * none
    else:
        assert not any(choice.num_drafts)
        assert best <= MIN_GAIN * none * (1 + 1e-9)
        assert choice.reason is (DraftReason.POOR_ODDS if max_rows else DraftReason.NO_ROOM)
    # What may be left out changes nothing.
    least = least_chance(num_sequences, num_sequences, costs)
    kept = [[chance for chance in each if chance >= least] for each in chances]
    assert choose_drafts(kept, num_sequences, num_sequences, costs, max_rows).num_drafts == choice.num_drafts


def test_reasons_name_what_is_missing() -> None:
    costs = line(1.0, 0.1)
    assert choose_drafts([], 3, 3, costs, 8).reason is DraftReason.NO_MATCH
    assert choose_drafts([[0.9]], 3, 3, costs, 0).reason is DraftReason.NO_ROOM
    assert choose_drafts([[0.01]], 3, 3, costs, 8).reason is DraftReason.POOR_ODDS
    choice = choose_drafts([[0.9, 0.8], [0.01]], 3, 3, costs, 8)
    assert (choice.reason, choice.num_drafts) == (DraftReason.PAYS, (2, 0))


def test_free_rows_are_all_taken_and_dear_ones_need_good_odds() -> None:
    chances = falling([0.9] * 8)
    assert choose_drafts([chances], 1, 1, line(1.0, 0.0001), 8).num_drafts == (8,)
    assert choose_drafts([chances], 1, 1, line(1.0, 0.25), 8).num_drafts in {(6,), (7,)}
    assert choose_drafts([chances], 1, 1, line(0.05, 0.95), 8).num_drafts == (0,)


def test_costs_are_a_line_through_what_was_measured_and_expected_before() -> None:
    costs = RowCosts()
    assert costs.step_s(1) == pytest.approx(1.0)
    assert costs.row_s == EXPECTED_SLOPE
    costs.observe(0, 5.0)
    costs.observe(3, 0.0)
    assert costs.step_s(1) == pytest.approx(1.0)
    for _ in range(50):
        costs.observe(1, 0.002)
    assert costs.step_s(1) == pytest.approx(0.002)
    assert costs.row_s == pytest.approx(0.002 * EXPECTED_SLOPE)
    costs = line(0.0019, 0.00047)
    assert costs.step_s(5) == pytest.approx(0.0019 + 5 * 0.00047, rel=0.02)
    assert costs.row_s == pytest.approx(0.00047, rel=0.1)


def test_costs_follow_a_context_that_grows_and_pass_over_a_disturbance() -> None:
    costs = line(0.002, 0.0005)
    before_s = costs.step_s(4)
    costs.observe(4, 30.0)
    assert costs.step_s(4) <= before_s * (1 + (MAX_DEVIATION - 1) / 50)
    for step in range(300):
        costs.observe(1 + step % 4, 0.006 + 0.001 * (1 + step % 4))
    assert costs.step_s(4) == pytest.approx(0.010, rel=0.1)


def test_a_row_costs_something_whatever_noise_says() -> None:
    costs, rng = RowCosts(), random.Random(1)
    for _ in range(300):
        rows = rng.randrange(1, 6)
        costs.observe(rows, rng.uniform(0.5, 1.5) * (0.01 - 0.0015 * rows))
        assert 0.0 < costs.row_s
        assert 0.0 < costs.step_s(1) < costs.step_s(2)
