"""When an engine without memory looks again, and how long a request may wait for it."""

from __future__ import annotations

from naru_worker.core.memory_wait import LEAST_RETRY_S, RETRY_S, MemoryWait


def test_it_looks_again_after_a_while_or_soon_after_a_booking() -> None:
    wait = MemoryWait(10.0)
    assert not wait.is_waiting
    wait.begin(1.0, version=5)
    assert wait.is_waiting
    assert wait.wake_s == 1.0 + RETRY_S
    assert not wait.is_due(1.0 + RETRY_S / 2, version=5)
    assert wait.is_due(1.0 + RETRY_S, version=5)
    assert not wait.is_due(1.0 + LEAST_RETRY_S / 2, version=6)
    assert wait.is_due(1.0 + LEAST_RETRY_S, version=6)


def test_a_change_of_who_waits_is_looked_at_at_once_and_only_once() -> None:
    wait = MemoryWait(10.0)
    wait.begin(1.0, version=5)
    wait.hurry()
    assert wait.wake_s == 1.0
    assert wait.is_due(1.0, version=5)
    wait.begin(1.0, version=5)
    assert not wait.is_due(1.0, version=5)


def test_the_limit_counts_from_the_first_starved_plan_or_from_arrival() -> None:
    wait = MemoryWait(10.0)
    wait.begin(100.0, version=0)
    wait.begin(105.0, version=0)
    assert not wait.is_over(109.9, arrived_s=3.0)
    assert wait.is_over(110.0, arrived_s=3.0)
    assert not wait.is_over(110.0, arrived_s=104.0)
    assert wait.is_over(114.0, arrived_s=104.0)
    wait.end()
    assert not wait.is_over(999.0, arrived_s=0.0)
    wait.begin(999.0, version=0)
    assert not wait.is_over(1008.0, arrived_s=0.0)
