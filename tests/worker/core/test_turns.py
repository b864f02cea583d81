"""Deficit round robin among engines: shares, bounds, and what coming and going brings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_worker.core.turns import MAX_WEIGHT, QUANTUM_S, Contender, Turns, turn_weight

steps_s = st.floats(0.0005, 0.06)
ages_s = st.floats(0.0, 3.0)


def run(turns: Turns, steps: dict[int, float], ages: dict[int, float], duration_s: float) -> list[tuple[int, float]]:
    """Who stepped, in order, and when; all of them always have work."""
    contenders = [Contender(engine_id, ages.get(engine_id, 0.0)) for engine_id in sorted(steps)]
    now_s, order = 0.0, []
    while now_s < duration_s:
        chosen = turns.choose(contenders)
        order.append((chosen, now_s))
        turns.charge(chosen, steps[chosen])
        now_s += steps[chosen]
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(steps_s, ages_s), min_size=2, max_size=5))
def test_compute_time_is_shared_by_weight_whatever_the_length_of_steps(engines: list[tuple[float, float]]) -> None:
    steps = {index: step_s for index, (step_s, _) in enumerate(engines)}
    ages = {index: age_s for index, (_, age_s) in enumerate(engines)}
    order = run(Turns(), steps, ages, 3.0)
    used = {index: sum(steps[chosen] for chosen, _ in order if chosen == index) for index in steps}
    fair = [used[index] / turn_weight(ages[index]) for index in steps]
    # Nobody is ahead by more than a step it overdrew and what it may still use of two rounds.
    assert max(fair) - min(fair) <= max(steps.values()) + 3 * QUANTUM_S


def test_steps_of_3_ms_and_of_40_ms_get_half_of_the_time_each() -> None:
    order = run(Turns(), {0: 0.003, 1: 0.040}, {}, 60.0)
    short_s = sum(0.003 for chosen, _ in order if chosen == 0)
    assert short_s == pytest.approx(30.0, rel=0.01)


def test_an_engine_whose_requests_have_waited_gets_twice_the_time() -> None:
    order = run(Turns(), {0: 0.004, 1: 0.004}, {1: 5.0}, 60.0)
    waited_s = sum(0.004 for chosen, _ in order if chosen == 1)
    assert waited_s == pytest.approx(60.0 * MAX_WEIGHT / (1 + MAX_WEIGHT), rel=0.01)


def test_equal_short_steps_alternate() -> None:
    order = run(Turns(), {4: 0.006, 7: 0.006, 9: 0.006}, {}, 0.1)
    assert [chosen for chosen, _ in order][:9] == [4, 7, 9] * 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(steps_s, ages_s, st.booleans()), min_size=40, max_size=40), min_size=2, max_size=5))
def test_nobody_with_work_waits_longer_than_the_bound(script: list[list[tuple[float, float, bool]]]) -> None:
    """Engines come and go, steps and ages change: the wait is bounded by the longest steps of the others."""
    turns = Turns()
    num_engines = len(script)
    longest_s = max(step_s for track in script for step_s, _, _ in track)
    bound_s = (num_engines - 1) * ((longest_s / QUANTUM_S + 2) * QUANTUM_S * MAX_WEIGHT + longest_s)
    waited_s = [0.0] * num_engines
    for turn in range(200):
        states = [track[turn % len(track)] for track in script]
        working = [index for index in range(num_engines) if states[index][2] or index == turn // 25 % num_engines]
        chosen = turns.choose([Contender(index, states[index][1]) for index in working])
        assert chosen in working
        step_s = states[chosen][0]
        turns.charge(chosen, step_s)
        for index in range(num_engines):
            waited_s[index] = waited_s[index] + step_s if index in working and index != chosen else 0.0
            assert waited_s[index] <= bound_s + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 3.0), steps_s, steps_s, st.integers(0, 5))
def test_an_engine_that_comes_back_has_saved_nothing_up(
    away_s: float, own_step_s: float, other_step_s: float, num_shared: int
) -> None:
    turns = Turns()
    both = [Contender(0), Contender(1), Contender(2)]
    for _ in range(num_shared):
        turns.charge(turns.choose(both), own_step_s)
    now_s = 0.0
    while now_s < away_s:
        chosen = turns.choose(both[1:])
        turns.charge(chosen, other_step_s)
        now_s += other_step_s
    used_s = {0: 0.0, 1: 0.0, 2: 0.0}
    for _ in range(100):
        chosen = turns.choose(both)
        step_s = own_step_s if chosen == 0 else other_step_s
        turns.charge(chosen, step_s)
        used_s[chosen] += step_s
        # What the others overdrew when it came, a step it overdraws itself, and quanta not used yet.
        assert used_s[0] <= min(used_s[1], used_s[2]) + other_step_s + own_step_s + 3 * QUANTUM_S


@pytest.mark.parametrize("num_others", [1, 2])
def test_being_away_for_a_moment_pays_no_debt(num_others: int) -> None:
    """One-step requests of 40 ms, one after the other, beside steps of 3 ms: a fair share, not nearly all of it."""
    turns = Turns()
    others = [Contender(1 + index) for index in range(num_others)]
    used = dict.fromkeys(range(num_others + 1), 0.0)
    num_away = 0
    for _ in range(4000):
        chosen = turns.choose(others if num_away else [Contender(0), *others])
        step_s = 0.040 if chosen == 0 else 0.003
        turns.charge(chosen, step_s)
        used[chosen] += step_s
        num_away = 4 if chosen == 0 else max(0, num_away - 1)
    assert used[0] < 1.3 * used[1]


def test_what_was_owed_is_paid_while_others_had_the_time() -> None:
    turns = Turns()
    everybody = [Contender(0), Contender(1), Contender(2)]
    assert turns.choose(everybody) == 0
    turns.charge(0, 1.0)
    for _ in range(1000):
        turns.charge(turns.choose(everybody[1:]), 0.003)
    order = run(turns, {0: 0.003, 1: 0.003, 2: 0.003}, {}, 0.05)
    assert 0 in [chosen for chosen, _ in order][:6]


def test_time_that_nobody_else_wanted_is_not_owed() -> None:
    turns = Turns()
    both = [Contender(0), Contender(1)]
    assert turns.choose(both) == 0
    turns.charge(0, 2.0)
    for _ in range(100):
        assert turns.choose([Contender(0)]) == 0
        turns.charge(0, 0.05)
    order = run(turns, {0: 0.005, 1: 0.005}, {}, 0.1)
    assert sum(chosen == 0 for chosen, _ in order) == pytest.approx(len(order) / 2, abs=2)


def test_one_engine_alone_leaves_no_record() -> None:
    turns = Turns()
    for _ in range(1000):
        assert turns.choose((Contender(3),)) == 3
        turns.charge(3, 0.01)
    assert turns._balances == {}


def test_an_engine_that_has_left_is_forgotten() -> None:
    turns = Turns()
    both = [Contender(0), Contender(1)]
    for _ in range(4):
        turns.charge(turns.choose(both), 0.02)
    turns.forget(1)
    assert set(turns._balances) == {0}
    assert turns.choose([Contender(0), Contender(2)]) in (0, 2)


def test_a_quantum_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantum_s is 0\.0"):
        Turns(0.0)


@pytest.mark.parametrize(("age_s", "weight"), [(-1.0, 1.0), (0.0, 1.0), (0.5, 1.5), (1.0, 2.0), (900.0, 2.0)])
def test_weight_grows_with_age_up_to_a_bound(age_s: float, weight: float) -> None:
    assert turn_weight(age_s) == weight
