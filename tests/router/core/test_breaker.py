"""A worker's circuit: when it opens, who tries it, and what closes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InternalError, InvalidRequest, ModelNotFound, NaruError, Overloaded, Unavailable
from naru_router.core.breaker import Breaker, BreakerSettings, Circuit, is_fault
from naru_router.core.retry import AttemptFailed, FailureKind

SETTINGS = BreakerSettings(max_faults=3, min_pause_s=1.0, max_pause_s=4.0, max_probe_s=10.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed(breaker.sent(now_s), now_s, "engine failed")
    assert breaker.circuit(now_s) is Circuit.OPEN
    return breaker


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(SETTINGS)
    for outcome in "ffsffsff":
        term = breaker.sent(0.0)
        if outcome == "s":
            breaker.succeeded(term)
        else:
            breaker.failed(term, 0.0, "engine failed")
        assert breaker.circuit(0.0) is Circuit.CLOSED
    breaker.failed(breaker.sent(0.0), 0.0, "engine failed")
    assert breaker.circuit(0.0) is Circuit.OPEN
    assert breaker.reason == "3 faults in a row, the last one: engine failed"


def test_one_broken_stream_counts_once_however_many_requests_it_carried() -> None:
    breaker = Breaker(SETTINGS)
    terms = [breaker.sent(0.0) for _ in range(50)]
    life = object()
    for term in terms:
        breaker.failed(term, 0.0, "lost", life)
    assert breaker.circuit(0.0) is Circuit.CLOSED
    for _ in range(2):
        breaker.failed(breaker.sent(1.0), 1.0, "lost", object())
    assert breaker.circuit(1.0) is Circuit.OPEN


def test_after_the_pause_one_request_tries_it_and_closes_it() -> None:
    breaker = opened()
    assert breaker.circuit(0.99) is Circuit.OPEN
    assert breaker.circuit(1.0) is Circuit.HALF_OPEN
    term = breaker.sent(1.0)
    assert breaker.circuit(1.0) is Circuit.PROBING
    # Others that were sent all the same are no further probes.
    assert breaker.sent(1.1) == term and breaker.circuit(1.1) is Circuit.PROBING
    breaker.succeeded(term)
    assert breaker.circuit(1.2) is Circuit.CLOSED and not breaker.reason


def test_pauses_double_up_to_the_longest_and_start_anew_after_a_success() -> None:
    breaker = opened()
    now_s = 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        assert breaker.circuit(now_s + pause_s - 0.01) is Circuit.OPEN
        now_s += pause_s
        assert breaker.circuit(now_s) is Circuit.HALF_OPEN
        breaker.failed(breaker.sent(now_s), now_s, "again")
        assert breaker.reason == "again"
    now_s += 4.0
    breaker.succeeded(breaker.sent(now_s))
    for _ in range(3):
        breaker.failed(breaker.sent(now_s), now_s, "x")
    assert breaker.circuit(now_s + 1.0) is Circuit.HALF_OPEN


def test_what_becomes_of_requests_of_an_earlier_term_says_nothing() -> None:
    breaker = Breaker(SETTINGS)
    old = breaker.sent(0.0)
    for _ in range(3):
        breaker.failed(breaker.sent(0.0), 0.0, "x")
    breaker.succeeded(old)
    assert breaker.circuit(0.5) is Circuit.OPEN
    probe = breaker.sent(1.0)
    breaker.failed(old, 1.0, "x")
    assert breaker.circuit(1.0) is Circuit.PROBING
    breaker.succeeded(old)
    assert breaker.circuit(1.0) is Circuit.PROBING
    breaker.succeeded(probe)
    breaker.failed(old, 1.0, "x")
    assert breaker.circuit(1.0) is Circuit.CLOSED


def test_a_probe_whose_client_left_makes_room_for_another_one() -> None:
    breaker = opened()
    term = breaker.sent(1.0)
    breaker.abandoned(term, 1.5)
    assert breaker.circuit(1.5) is Circuit.HALF_OPEN
    later = breaker.sent(1.5)
    breaker.abandoned(term, 1.6)
    assert later != term and breaker.circuit(1.6) is Circuit.PROBING


def test_a_probe_without_an_outcome_is_forgotten() -> None:
    breaker = opened()
    breaker.sent(1.0)
    assert breaker.circuit(10.9) is Circuit.PROBING
    assert breaker.circuit(11.0) is Circuit.HALF_OPEN


def test_it_can_be_opened_for_other_reasons() -> None:
    breaker = Breaker(SETTINGS)
    breaker.trip(5.0, "slow")
    assert (breaker.circuit(5.9), breaker.circuit(6.0), breaker.reason) == (Circuit.OPEN, Circuit.HALF_OPEN, "slow")


@given(st.lists(st.tuples(st.sampled_from("sfat"), st.integers(0, 5), st.floats(0, 5)), max_size=60))
def test_it_never_stays_shut_for_ever(steps: list[tuple[str, int, float]]) -> None:
    breaker, now_s, terms = Breaker(SETTINGS), 0.0, [0]
    for action, back, pause_s in steps:
        now_s += pause_s
        term = terms[-min(back + 1, len(terms))]
        if action == "t":
            terms.append(breaker.sent(now_s))
        elif action == "s":
            breaker.succeeded(term)
        elif action == "a":
            breaker.abandoned(term, now_s)
        else:
            breaker.failed(term, now_s, "x", object())
    assert breaker.circuit(now_s + SETTINGS.max_probe_s) in (Circuit.CLOSED, Circuit.HALF_OPEN)


@pytest.mark.parametrize(
    ("error", "kind", "expected"),
    [
        (Unavailable("x"), FailureKind.STREAM_LOST, True),
        (InternalError("x"), FailureKind.WORKER_ERROR, True),
        (Unavailable("x"), FailureKind.WORKER_ERROR, True),
        (Overloaded("x"), FailureKind.WORKER_ERROR, False),
        (InvalidRequest("x"), FailureKind.WORKER_ERROR, False),
        (ModelNotFound("x"), FailureKind.WORKER_ERROR, False),
        (Unavailable("x"), FailureKind.SHUTDOWN, False),
    ],
)
def test_only_what_a_sound_worker_would_not_say_speaks_against_it(
    error: NaruError, kind: FailureKind, expected: bool
) -> None:
    assert is_fault(AttemptFailed(error, kind, is_retryable=True)) is expected
