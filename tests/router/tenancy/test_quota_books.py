"""The books of one quota without Redis: whatever order things happen in, what is held and used is never lost."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_router.core.tenancy.quota import SHARE_TTL_S, WINDOW_S, Answer, Ask, Share


def granted(ask: Ask, *, used: int = 0, others: int = 0, limit: int = 10**9) -> Answer:
    return Answer(max(0, min(ask.held + ask.want, limit - used - others)), used, others, 0.0, 0.0)


def refilled(share: Share, now_s: float = 0.0, **sums: int) -> None:
    ask = share.ask(now_s, 1, 1)
    share.answered(ask, granted(ask, **sums), now_s, now_s)


def test_nothing_is_given_out_that_was_not_taken_before() -> None:
    share = Share(10)
    assert not share.take(1, 0.0)
    share.waiting = 3
    refilled(share)
    assert [share.take(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert (share.spare, share.reserved) == (0, 3)


def test_a_share_that_was_not_renewed_is_not_ours_any_more() -> None:
    share = Share(10, waiting=2)
    refilled(share)
    assert share.take(1, SHARE_TTL_S - 0.01)
    assert not share.take(1, SHARE_TTL_S)
    assert share.ask(SHARE_TTL_S, 1, 2).held == 0


def test_what_is_given_out_while_an_answer_is_on_its_way_counts_against_it() -> None:
    share = Share(100, waiting=10)
    refilled(share)
    ask = share.ask(0.0, 1, 2)
    assert share.take(4, 0.0)
    share.settle(4, 6, 0.0)
    share.answered(ask, Answer(12, 0, 0, 0.0, 0.0), 0.0, 0.0)
    assert (share.spare, share.reserved, share.used_total - share.told_total) == (6, 0, 6)


def test_what_goes_back_cannot_be_given_out_meanwhile() -> None:
    share = Share(100, waiting=10)
    refilled(share)
    share.waiting = 0
    ask = share.ask(5.0, 1, 2)
    assert (ask.held, ask.want) == (0, 0)
    assert not share.take(1, 5.0)


def test_a_request_that_took_less_leaves_the_rest_and_one_that_took_more_is_told_in_full() -> None:
    share = Share(1000, waiting=100)
    refilled(share)
    assert share.take(60, 0.0)
    share.settle(60, 10, 0.0)
    assert (share.spare, share.used_total) == (90, 10)
    assert share.take(90, 0.0)
    share.settle(90, 140, 0.0)
    assert (share.spare, share.used_total) == (-50, 150)
    assert share.ask(0.0, 1, 2).held == 0


def test_shares_ahead_of_use_follow_use_and_never_take_much_of_a_limit() -> None:
    share = Share(8000, waiting=1)
    refilled(share)
    assert share.ask(0.2, 1, 2).want == 0
    share.waiting = 200
    refilled(share, 0.3)
    share.waiting = 0
    for _ in range(100):
        assert share.take(1, 0.5)
        share.settle(1, 1, 0.5)
    ask = share.ask(0.6, 1, 3)
    assert 100 <= ask.held + ask.want <= 1000
    assert share.is_due(1.2, 1)
    crowd = dataclasses.replace(share, limit=80)
    assert crowd.ask(0.6, 10, 4).want == 0


def test_a_limit_without_the_sum_is_shared_out_by_routers() -> None:
    share = Share(100)
    assert sum(share.take_apart(1, 0.0, 4) for _ in range(100)) == 25
    for _ in range(25):
        share.settle(1, 1, 0.0)
    assert not share.take_apart(1, WINDOW_S - 1, 4)
    assert share.take_apart(1, WINDOW_S + 3, 4)
    assert Share(3).take_apart(1, 0.0, 10)


def test_without_the_sum_what_was_left_at_the_last_answer_is_shared_out_first() -> None:
    share = Share(100, waiting=1)
    refilled(share, used=80, limit=100)
    assert sum(share.take_apart(1, SHARE_TTL_S + 1, 4) for _ in range(100)) == 5
    level = Share(8, is_level=True)
    assert [level.take_apart(1, 0.0, 4) for _ in range(3)] == [True, True, False]
    level.settle(1, 7, 0.0)
    assert level.used_total == 0 and level.take_apart(1, 0.0, 4)


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, 60), (1.0, 60), (WINDOW_S, 100)])
def test_what_remains_is_told_from_the_last_answer_while_it_says_something(age_s: float, expected: int) -> None:
    share = Share(100, waiting=5)
    ask = share.ask(0.0, 1, 1)
    share.answered(ask, Answer(5, 30, 10, 0.0, 42.0), 0.0, 0.0)
    assert share.remaining(age_s) == expected
    assert share.reset_s(2.0) == 40.0


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "settle", "exchange", "lost", "wait"]), st.integers(1, 9)), max_size=40
)


@settings(max_examples=200)
@given(STEPS, st.integers(1, 40))
def test_one_router_never_gives_out_more_than_the_limit_while_the_sum_answers(
    steps: list[tuple[str, int]], limit: int
) -> None:
    """One window, requests that take exactly what they reserve; Redis as a plain sum."""
    share, now_s, sequence = Share(limit), 0.0, 0
    running: list[int] = []
    used = given_out = 0
    for step, amount in steps:
        if step == "take" and share.take(amount, now_s):
            running.append(amount)
            given_out += amount
        elif step == "settle" and running:
            done = running.pop()
            share.settle(done, done, now_s)
        elif step in ("exchange", "lost"):
            share.waiting, sequence = amount, sequence + 1
            ask = share.ask(now_s, 1, sequence)
            share.waiting = 0
            used = ask.used_total
            if step == "exchange":
                share.answered(ask, granted(ask, used=used, limit=limit), now_s, now_s)
        elif step == "wait":
            now_s += amount / 10
        assert given_out <= limit
        assert share.reserved == sum(running)
