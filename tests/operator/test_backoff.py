"""Restart pauses."""

from __future__ import annotations

from naru_operator.core.backoff import count_failures, restart_delay_s


def test_pauses_double_up_to_half_a_minute() -> None:
    assert [restart_delay_s(n) for n in (1, 2, 3, 8, 9, 10_000)] == [0.25, 0.5, 1.0, 30.0, 30.0, 30.0]


def test_a_stable_run_makes_the_next_failure_the_first() -> None:
    assert count_failures(7, uptime_s=1.0) == 8
    assert count_failures(7, uptime_s=30.0) == 1
