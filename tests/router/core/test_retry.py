"""The verdict on a failed attempt, and the budget of retries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LoadError,
    ModelNotFound,
    NaruError,
    Overloaded,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)
from naru_router.core.retry import MAX_ATTEMPTS, AttemptFailed, FailureKind, decide_retry
from naru_router.core.retry_budget import BudgetSettings, RetryBudget


def lost(*, may_have_run: bool = True) -> AttemptFailed:
    error = Unavailable("the stream broke")
    return AttemptFailed(error, FailureKind.STREAM_LOST, is_retryable=True, may_have_run=may_have_run)


def told(error: NaruError, *, is_retryable: bool = True) -> AttemptFailed:
    return AttemptFailed(error, FailureKind.WORKER_ERROR, is_retryable=is_retryable)


@pytest.mark.parametrize(
    ("failed", "num_attempts", "has_sent", "is_retry"),
    [
        (lost(), 1, False, True),
        (lost(), 2, False, False),
        (lost(), 1, True, False),
        (told(InternalError("x")), 1, False, True),
        (told(InternalError("x")), 2, False, False),
        (told(InvalidRequest("x"), is_retryable=False), 1, False, False),
        (told(ModelNotFound("x"), is_retryable=False), 1, False, True),
        (told(ModelNotFound("x"), is_retryable=False), 2, False, True),
        (told(ModelNotFound("x"), is_retryable=False), 1, True, False),
    ],
)
def test_one_retry_before_the_first_byte_where_nothing_else_is_said(
    failed: AttemptFailed, num_attempts: int, has_sent: bool, is_retry: bool
) -> None:
    verdict = decide_retry(failed, num_attempts=num_attempts, has_sent=has_sent)
    assert verdict.is_retry is is_retry and verdict.reason
    # That a worker let a model go is never told as "no such model".
    assert not isinstance(verdict.error, ModelNotFound)


@pytest.mark.parametrize("max_retries", [0, 1, 2, 3])
def test_worker_errors_are_tried_again_as_often_as_the_model_allows(max_retries: int) -> None:
    failed = told(InternalError("x"))
    num_attempts = 1
    while decide_retry(failed, num_attempts=num_attempts, has_sent=False, max_retries=max_retries).is_retry:
        num_attempts += 1
    assert num_attempts == 1 + max_retries


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("x"),
        ContextLengthExceeded("x"),
        Unauthenticated("x"),
        QuotaExceeded("x"),
        Cancelled("x"),
        DeadlineExceeded("x"),
    ],
)
def test_the_clients_own_faults_are_told_at_once_whatever_the_worker_says(error: NaruError) -> None:
    verdict = decide_retry(told(error), num_attempts=1, has_sent=False, max_retries=3)
    assert not verdict.is_retry and verdict.error is error


def test_what_the_worker_calls_final_is_told_at_once() -> None:
    verdict = decide_retry(told(LoadError("x"), is_retryable=False), num_attempts=1, has_sent=False, max_retries=3)
    assert not verdict.is_retry


def test_one_other_worker_is_asked_after_a_busy_one_and_then_the_client_is_told_when_to_come_back() -> None:
    busy = Overloaded("full")
    busy.retry_after_s = 4.0
    first = decide_retry(told(busy), num_attempts=1, has_sent=False, max_retries=3)
    assert first.is_retry and first.spends and not first.may_raise
    second = decide_retry(told(busy), num_attempts=2, has_sent=False, max_retries=3, num_refusals=1)
    assert not second.is_retry and second.error is busy and second.error.retry_after_s == 4.0
    assert not decide_retry(told(busy), num_attempts=1, has_sent=False, may_spend=False).is_retry


def test_a_request_that_two_workers_were_lost_with_gets_no_third() -> None:
    for max_retries in (1, 3):
        for can_go_on in (False, True):
            verdict = decide_retry(
                lost(), num_attempts=2, has_sent=can_go_on, can_go_on=can_go_on, max_retries=max_retries, num_losses=1
            )
            assert not verdict.is_retry and "lost" in verdict.reason


def test_a_second_loss_that_the_request_cannot_have_caused_gets_a_third_worker_and_no_fourth() -> None:
    unsent = lost(may_have_run=False)
    for can_go_on in (False, True):
        for num_attempts, is_retry in ((1, True), (2, True), (MAX_ATTEMPTS, False)):
            verdict = decide_retry(
                unsent, num_attempts=num_attempts, has_sent=can_go_on, can_go_on=can_go_on, num_losses=1
            )
            assert verdict.is_retry is is_retry
    # And one that dies after a busy one is no second loss.
    assert decide_retry(lost(), num_attempts=2, has_sent=False, num_refusals=1, num_losses=0).is_retry


def test_without_retries_an_answer_that_has_begun_is_still_continued() -> None:
    assert not decide_retry(lost(), num_attempts=1, has_sent=False, max_retries=0).is_retry
    assert decide_retry(lost(), num_attempts=1, has_sent=True, can_go_on=True, max_retries=0).is_retry


def test_the_first_move_from_a_lost_or_leaving_worker_is_free_and_everything_else_is_paid() -> None:
    free = [
        decide_retry(lost(), num_attempts=1, has_sent=False, may_spend=False),
        decide_retry(told(Unavailable("drained")), num_attempts=1, has_sent=True, can_go_on=True, may_spend=False),
        decide_retry(told(Unavailable("draining")), num_attempts=1, has_sent=False, may_spend=False),
        decide_retry(told(ModelNotFound("gone")), num_attempts=1, has_sent=False, may_spend=False),
    ]
    assert all(verdict.is_retry and not verdict.spends for verdict in free)
    paid = [(told(InternalError("x")), 1), (told(Overloaded("x")), 1), (lost(may_have_run=False), 2)]
    for failed, num_attempts in paid:
        rich, poor = (
            decide_retry(failed, num_attempts=num_attempts, has_sent=False, num_losses=0, may_spend=may_spend)
            for may_spend in (True, False)
        )
        assert rich.is_retry and rich.spends
        assert not poor.is_retry and "budget" in poor.reason


@pytest.mark.parametrize("failed", [lost(), told(InternalError("x")), told(ModelNotFound("x"))])
def test_nothing_is_tried_after_the_deadline(failed: AttemptFailed) -> None:
    verdict = decide_retry(failed, num_attempts=1, has_sent=False, remaining_s=0.0)
    assert not verdict.is_retry and isinstance(verdict.error, DeadlineExceeded)
    assert decide_retry(failed, num_attempts=1, has_sent=False, remaining_s=0.1).is_retry


def test_what_a_worker_says_of_the_deadline_is_told_as_it_is() -> None:
    failed = told(DeadlineExceeded("not done within 1 s"))
    verdict = decide_retry(failed, num_attempts=1, has_sent=False, remaining_s=0.0)
    assert not verdict.is_retry and verdict.error is failed.error


ERRORS = st.sampled_from([told(InternalError("x")), told(Overloaded("x")), told(Unavailable("x")), lost()])


@given(st.lists(ERRORS | st.just(lost(may_have_run=False)), min_size=8, max_size=8), st.integers(0, 3), st.booleans())
def test_no_request_is_sent_more_often_than_its_limits_say(
    failures: list[AttemptFailed], max_retries: int, can_go_on: bool
) -> None:
    num_attempts = num_refusals = num_losses = 0
    for failed in failures:
        num_attempts += 1
        verdict = decide_retry(
            failed,
            num_attempts=num_attempts,
            has_sent=can_go_on,
            can_go_on=can_go_on,
            max_retries=max_retries,
            num_refusals=num_refusals,
            num_losses=num_losses,
        )
        num_refusals += failed.is_refusal
        num_losses += failed.is_deadly
        if not verdict.is_retry:
            break
    assert num_attempts <= max(1 + max_retries, MAX_ATTEMPTS)
    assert num_refusals <= 2 and num_losses <= 2


def test_retries_are_a_tenth_of_the_requests_of_a_window_and_a_floor() -> None:
    budget = RetryBudget(BudgetSettings(share=0.1, floor=3, window_s=10.0))
    assert [_try(budget, 0.0) for _ in range(5)] == [True, True, True, False, False]
    for number in range(100):
        budget.on_request(1.0 + number / 100)
    assert sum(_try(budget, 2.0) for _ in range(50)) == 10
    # The window has left the first three retries behind, and at last the requests as well.
    assert sum(_try(budget, 10.5) for _ in range(50)) == 3
    assert sum(_try(budget, 30.0) for _ in range(50)) == 3


@given(
    st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=150),
    st.floats(0.0, 0.5),
    st.integers(0, 5),
)
def test_no_window_has_more_retries_than_its_requests_allow(
    events: list[tuple[float, bool]], share: float, floor: int
) -> None:
    budget = RetryBudget(BudgetSettings(share, floor, window_s=10.0))
    now_s, requests, retries = 0.0, list[float](), list[float]()
    for pause_s, is_request in events:
        now_s += pause_s
        if is_request:
            budget.on_request(now_s)
            requests.append(now_s)
        elif _try(budget, now_s):
            retries.append(now_s)
            # Slices are counted whole: a window is between nine and ten of them long.
            num_requests = sum(at > now_s - 10.0 for at in requests)
            assert sum(at > now_s - 9.0 for at in retries) <= share * num_requests + floor + 1e-9


def test_refusals_are_not_tried_elsewhere_while_all_workers_are_busy() -> None:
    budget = RetryBudget(BudgetSettings(busy_pause_s=1.0))
    num_sent = 0
    for number in range(10):
        now_s = number / 100
        budget.on_request(now_s)
        num_sent += 1
        verdict = decide_retry(
            told(Overloaded("x")),
            num_attempts=1,
            has_sent=False,
            max_retries=3,
            may_spend=budget.allows(now_s, is_refusal=True),
        )
        if verdict.is_retry:
            budget.spend(now_s)
            num_sent += 1
            budget.refused_again(now_s)
    assert num_sent == 11
    assert budget.allows(0.5) and not budget.allows(0.5, is_refusal=True)
    assert budget.allows(1.01, is_refusal=True)


def _try(budget: RetryBudget, now_s: float) -> bool:
    is_allowed = budget.allows(now_s)
    if is_allowed:
        budget.spend(now_s)
    return is_allowed
