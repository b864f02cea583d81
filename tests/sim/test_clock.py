from __future__ import annotations

import pytest
from bench.sim.clock import InvariantViolation, Simulation


def test_events_happen_by_time_and_then_in_the_order_of_their_planning() -> None:
    sim, seen = Simulation(0), list[str]()
    sim.at(2.0, lambda: seen.append("late"))
    sim.at(1.0, lambda: seen.append("first of two"))
    sim.at(1.0, lambda: seen.append("second of two"))
    sim.run()
    assert seen == ["first of two", "second of two", "late"]
    assert sim.now_s == 2.0


def test_a_cancelled_event_does_not_happen_and_one_for_the_past_happens_now() -> None:
    sim, seen = Simulation(0), list[float]()
    sim.at(1.0, lambda: seen.append(sim.now_s)).cancel()

    def plan_for_the_past() -> None:
        sim.at(1.0, lambda: seen.append(sim.now_s))

    sim.at(3.0, plan_for_the_past)
    sim.run()
    assert seen == [3.0]


def test_a_run_stops_at_its_end_and_goes_on_from_there() -> None:
    sim, seen = Simulation(0), list[float]()
    for time_s in (1.0, 2.0, 3.0):
        sim.at(time_s, lambda: seen.append(sim.now_s))
    sim.run(2.0)
    assert seen == [1.0, 2.0]
    sim.run()
    assert seen == [1.0, 2.0, 3.0]


def test_the_check_runs_after_every_event() -> None:
    sim, checked = Simulation(0), list[float]()
    sim.after_event = lambda: checked.append(sim.now_s)
    sim.at(1.0, lambda: None)
    sim.at(2.0, lambda: None)
    sim.run()
    assert checked == [1.0, 2.0]


def test_events_that_go_in_circles_are_found() -> None:
    sim = Simulation(0)

    def again() -> None:
        sim.after(0.0, again)

    again()
    with pytest.raises(InvariantViolation, match="without time passing"):
        sim.run()
