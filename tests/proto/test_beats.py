"""Rounds of one process fall on the same instants."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.beats import PHASE_S, until_beat_s


@given(now_s=st.floats(0, 1e7), interval_s=st.floats(0.01, 100))
def test_a_beat_is_neither_at_once_nor_much_later_than_the_interval(now_s: float, interval_s: float) -> None:
    delay_s = until_beat_s(now_s, interval_s)
    assert 0.0999 * interval_s <= delay_s <= 1.1001 * interval_s
    beats = (now_s + delay_s - PHASE_S) / interval_s
    assert math.isclose(beats, round(beats), abs_tol=1e-6 * max(1.0, beats)), "it is one of the interval's instants"


@pytest.mark.parametrize("late_s", [-0.001, 0.0, 0.001, 0.2])
def test_a_round_that_is_early_or_late_does_not_come_twice(late_s: float) -> None:
    """Timers may go off a millisecond before their time."""
    at_s = 1000.0 + PHASE_S + late_s
    assert until_beat_s(at_s, 1.0) == pytest.approx(1.0 - late_s)


def test_a_beat_of_two_seconds_is_one_of_a_second() -> None:
    beat_s = 1234.5 + until_beat_s(1234.5, 2.0)
    assert until_beat_s(beat_s, 1.0) == pytest.approx(1.0)
