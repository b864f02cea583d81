"""Workers that are far slower than their peers are left alone, never all of them, and come back by one request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_router.core.breaker import BreakerSettings, Circuit
from naru_router.core.slow_workers import SlownessSettings, SlowWorkers

SETTINGS = SlownessSettings(circuit=BreakerSettings(min_pause_s=10.0, max_pause_s=40.0))


def run(workers: SlowWorkers, factors: dict[str, float], from_s: int, to_s: int) -> dict[str, str]:
    """One request a second on each worker that is no suspect; a review each second. Returns who became suspect."""
    found: dict[str, str] = {}
    for now_s in range(from_s, to_s):
        for worker_id, factor in factors.items():
            if workers.circuit(worker_id, now_s) is Circuit.CLOSED:
                term = workers.sent(worker_id, now_s)
                workers.first_token(worker_id, term, 0.4 * factor, 0.4, now_s)
        found.update(workers.review(now_s))
    return found


def test_a_worker_that_is_far_slower_for_long_becomes_suspect() -> None:
    workers = SlowWorkers(SETTINGS)
    factors = {"a": 1.0, "b": 1.2, "c": 6.0, "d": 0.9}
    assert run(workers, factors, 0, 14) == {}  # five samples, and ten seconds of patience
    found = run(workers, factors, 14, 16)
    assert list(found) == ["c"] and "times as long as its peers'" in found["c"]
    assert workers.circuit("c", 15.0) is Circuit.OPEN and workers.circuit("a", 15.0) is Circuit.CLOSED


def test_a_short_spell_makes_no_suspect() -> None:
    workers = SlowWorkers(SETTINGS)
    assert run(workers, {"a": 1.0, "b": 1.0, "c": 1.0}, 0, 40) == {}
    # A spell of 8 s among 40 never brings the median up.
    assert run(workers, {"a": 1.0, "b": 1.0, "c": 9.0}, 40, 48) == {}
    assert run(workers, {"a": 1.0, "b": 1.0, "c": 1.0}, 48, 80) == {}


def test_estimates_that_are_wrong_for_all_make_none_suspect() -> None:
    assert run(SlowWorkers(SETTINGS), {"a": 9.0, "b": 10.0, "c": 11.0}, 0, 60) == {}


def test_milliseconds_make_none_suspect() -> None:
    workers = SlowWorkers(SETTINGS)
    for now_s in range(60):
        for worker_id, measured_s in (("a", 0.002), ("b", 0.002), ("c", 0.02)):
            workers.first_token(worker_id, workers.sent(worker_id, now_s), measured_s, 0.001, now_s)
        assert workers.review(now_s) == {}


def test_slow_decode_steps_make_a_suspect_model_by_model() -> None:
    workers = SlowWorkers(SETTINGS)
    found: dict[str, str] = {}
    for now_s in range(20):
        for worker_id, small_s, large_s in (("a", 0.01, 0.2), ("b", 0.01, 0.2), ("c", 0.01, 0.9)):
            workers.decode_step(worker_id, "small", small_s, now_s)
            workers.decode_step(worker_id, "large", large_s, now_s)
        # A worker that has the large model alone is not slow for that.
        workers.decode_step("d", "large", 0.2, now_s)
        found.update(workers.review(now_s))
    assert list(found) == ["c"] and "decode steps of 'large'" in found["c"]


def test_it_comes_back_when_one_request_finds_it_sound() -> None:
    workers = SlowWorkers(SETTINGS)
    factors = {"a": 1.0, "b": 1.0, "c": 6.0}
    assert "c" in run(workers, factors, 0, 16)
    at_s = 25.0
    run(workers, factors, 16, 25)
    assert workers.circuit("c", at_s) is Circuit.HALF_OPEN
    slow = workers.sent("c", at_s)
    assert workers.circuit("c", at_s) is Circuit.PROBING
    workers.first_token("c", slow, 4.0, 0.4, at_s + 4.0)
    assert workers.circuit("c", at_s + 23.9) is Circuit.OPEN  # twice the pause
    assert workers.circuit("c", at_s + 24.0) is Circuit.HALF_OPEN
    run(workers, {"a": 1.0, "b": 1.0}, 25, 49)
    sound = workers.sent("c", 49.0)
    workers.first_token("c", sound, 0.5, 0.4, 49.5)
    assert workers.circuit("c", 49.5) is Circuit.CLOSED
    # What it was before is forgotten.
    assert run(workers, {"a": 1.0, "b": 1.0, "c": 1.0}, 50, 70) == {}


def test_a_first_token_of_an_earlier_request_does_not_bring_it_back() -> None:
    workers = SlowWorkers(SETTINGS)
    early = workers.sent("c", 0.0)
    run(workers, {"a": 1.0, "b": 1.0, "c": 6.0}, 0, 16)
    workers.sent("c", 26.0)
    workers.first_token("c", early, 0.4, 0.4, 26.5)
    assert workers.circuit("c", 26.5) is Circuit.PROBING


def test_a_probe_that_ends_without_a_token_makes_room_for_another_one() -> None:
    workers = SlowWorkers(SETTINGS)
    run(workers, {"a": 1.0, "b": 1.0, "c": 6.0}, 0, 16)
    term = workers.sent("c", 26.0)
    workers.ended_without("c", term, 27.0)
    assert workers.circuit("c", 27.0) is Circuit.HALF_OPEN


def test_a_worker_that_is_gone_is_forgotten() -> None:
    workers = SlowWorkers(SETTINGS)
    run(workers, {"a": 1.0, "b": 1.0, "c": 6.0}, 0, 16)
    workers.forget("c")
    assert workers.circuit("c", 16.0) is Circuit.CLOSED


@given(st.dictionaries(st.sampled_from("abcdefg"), st.floats(0.1, 50.0), min_size=1), st.integers(0, 30))
def test_at_least_half_of_the_workers_are_no_suspects(factors: dict[str, float], more: int) -> None:
    workers = SlowWorkers(SETTINGS)
    run(workers, factors, 0, 17 + more)
    num_suspect = sum(workers.circuit(each, 16.0 + more) is not Circuit.CLOSED for each in factors)
    assert num_suspect <= len(factors) // 2
