from __future__ import annotations

import pytest
from bench.stats import best, median, percentile, ratio
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        pytest.param([3.0], 99, 3.0, id="one value is every percentile"),
        pytest.param([4.0, 1.0, 3.0, 2.0], 50, 2.5, id="between the two middle ones"),
        pytest.param([10.0, 20.0, 30.0], 0, 10.0, id="0 is the smallest"),
        pytest.param([10.0, 20.0, 30.0], 100, 30.0, id="100 is the largest"),
        pytest.param(list(range(101)), 99, 99.0, id="99 of 0 to 100"),
        pytest.param([0.0, 10.0], 25, 2.5, id="linear between neighbours"),
    ],
)
def test_a_percentile_interpolates_between_neighbours(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_lies_among_the_values_whatever_their_order(values: list[float], percent: float) -> None:
    result = percentile(values, percent)
    assert min(values) <= result <= max(values) or result == pytest.approx(min(values))
    assert result == percentile(sorted(values, reverse=True), percent)


def test_a_percentile_of_nothing_or_outside_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        median([])
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_a_ratio_with_a_missing_or_zero_side_is_missing() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_the_best_of_peers_is_missing_as_soon_as_one_peer_is() -> None:
    assert best([1.0, 3.0]) == 3.0
    assert best([1.0, 3.0], lowest=True) == 1.0
    assert best([1.0, None]) is None
    assert best([]) is None
