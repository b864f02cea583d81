"""What the real hub does in situations that are easy to name, each played through in virtual time."""

from __future__ import annotations

import dataclasses

from bench.sim.catalog import ModelProfile
from bench.sim.clock import Simulation
from bench.sim.fleet import SimFleet
from bench.sim.machine import NO_FAILURES, Failures, Machine
from bench.sim.requests import Outcome, Request
from bench.sim.worker import SimWorker, WorkerSetup
from bench.sim.workload import Arrival

from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Release
from naru_worker.core.hub.model import Footprint, Residency
from naru_worker.core.residency import ModelState

MACHINE = Machine(fetch_bytes_per_s=100.0, host_bytes_per_s=100.0, load_bytes_per_s=1000.0, fixed_s=0.01)
PINNED = Residency(pinned=True)
FOREVER = float("inf")


def model(name: str, weight_bytes: int = 100, residency: Residency | None = None) -> ModelProfile:
    footprint = Footprint(name, weight_bytes, kv_floor_bytes=0, workspace_bytes=0)
    return ModelProfile(name, footprint, residency=residency or Residency())


def fleet_of(
    *catalog: ModelProfile, budget_bytes: int, failures: Failures = NO_FAILURES, guard_loads: float = 0.0
) -> SimFleet:
    config = HubConfig(budget_bytes, 1000, high_watermark=1.0, low_watermark=1.0, guard_loads=guard_loads)
    fleet = SimFleet(Simulation(0, keep_trace=True), [WorkerSetup(config, MACHINE, failures)])
    fleet.deploy(catalog)
    return fleet


def play(fleet: SimFleet, *arrivals: tuple[float, str, float], max_wait_s: float = FOREVER) -> list[Request]:
    """(when, which, how long); returns all requests after everything has settled."""
    names = sorted({name for _, name, _ in arrivals})
    profiles = [model(name) for name in names]
    planned = [Arrival(time_s, names.index(name), duration_s, max_wait_s) for time_s, name, duration_s in arrivals]
    fleet.send(planned, profiles)
    fleet.sim.run(planned[-1].time_s)
    fleet.settle()
    return fleet.requests


def state(worker: SimWorker, name: str) -> ModelState:
    entry = worker.hub.entry(name)
    assert entry is not None
    return entry.state


def test_many_requests_for_a_cold_model_cause_one_load() -> None:
    fleet = fleet_of(model("a"), budget_bytes=100)
    requests = play(fleet, *((0.0, "a", 1.0) for _ in range(50)))
    assert {request.outcome for request in requests} == {Outcome.SERVED}
    assert not any(request.found_loaded for request in requests)
    assert fleet.workers[0].operations.num_loads == 1


def test_a_load_evicts_no_more_than_it_needs() -> None:
    names = [f"m{index}" for index in range(9)]
    fleet = fleet_of(*(model(name) for name in names), model("twice", 200), budget_bytes=1000)
    loads = [(float(20 * index), name, 0.1) for index, name in enumerate(names)]
    play(fleet, *loads, (400.0, "twice", 0.1))
    worker = fleet.workers[0]
    assert worker.tally.num_evictions == 1
    assert state(worker, "m0") is not ModelState.READY, "the longest idle one of equals leaves"
    assert all(state(worker, name) is ModelState.READY for name in (*names[1:], "twice"))


def test_a_running_request_is_never_cut_for_another_model_and_alternating_models_get_on() -> None:
    fleet = fleet_of(model("a"), model("b"), budget_bytes=100)
    requests = play(fleet, (0.0, "a", 60.0), *((10.0 + index, "ba"[index % 2], 0.5) for index in range(10)))
    assert {request.outcome for request in requests} == {Outcome.SERVED}
    assert requests[0].ended_s is not None and requests[0].started_s is not None
    assert requests[0].ended_s - requests[0].started_s == 60.0
    first_b = requests[1].started_s
    assert first_b is not None and first_b > requests[0].ended_s


def test_when_all_is_pinned_others_are_refused_with_a_reason_and_nothing_moves() -> None:
    fleet = fleet_of(
        *(dataclasses.replace(model(name, residency=PINNED), wishes_active=True) for name in ("a", "b")),
        model("c"),
        budget_bytes=200,
    )
    requests = play(fleet, (30.0, "c", 1.0), (31.0, "a", 1.0))
    assert (requests[0].outcome, requests[1].outcome) == (Outcome.FAILED, Outcome.SERVED)
    assert "pinned" in requests[0].reason
    assert fleet.workers[0].tally.num_evictions == 0


def test_a_model_that_can_never_fit_is_refused_with_the_numbers_and_evicts_nobody() -> None:
    fleet = fleet_of(model("a"), model("huge", 900), budget_bytes=500)
    requests = play(fleet, (0.0, "a", 1.0), (20.0, "huge", 1.0))
    assert requests[1].outcome is Outcome.FAILED
    assert "900" in requests[1].reason and "500" in requests[1].reason
    assert state(fleet.workers[0], "a") is ModelState.READY


def test_a_release_lets_running_requests_finish_until_its_deadline_and_no_longer() -> None:
    fleet = fleet_of(model("a"), budget_bytes=100)
    worker = fleet.workers[0]
    fleet.sim.at(10.0, lambda: worker.release(Release("a", 2, drain_timeout_s=5.0)))
    requests = play(fleet, (0.0, "a", 12.0), (0.0, "a", 60.0), (9.0, "a", 3.0))
    assert [request.outcome for request in requests] == [Outcome.SERVED, Outcome.FAILED, Outcome.SERVED]
    assert requests[1].ended_s == 15.0
    assert worker.operations.truth.copies == {}


def test_waiters_who_leave_do_not_stop_the_load() -> None:
    fleet = fleet_of(model("a", 1000), budget_bytes=1000)
    requests = play(fleet, *((4.0 * index, "a", 1.0) for index in range(8)), max_wait_s=3.0)
    outcomes = [request.outcome for request in requests]
    assert outcomes[0] is Outcome.EXPIRED
    assert outcomes[-1] is Outcome.SERVED
    assert fleet.workers[0].operations.num_loads == 1


def test_a_failing_load_is_tried_again_less_and_less_often_and_serves_when_it_works() -> None:
    fleet = fleet_of(model("a"), budget_bytes=100, failures=Failures(load=1.0))
    requests = play(fleet, *((float(index), "a", 0.1) for index in range(60)))
    assert requests[-2].outcome is Outcome.FAILED
    assert 3 <= fleet.workers[0].operations.num_loads <= 12


def test_a_restart_fails_what_it_had_and_serves_what_comes_after_it() -> None:
    fleet = fleet_of(model("a"), budget_bytes=100)
    fleet.sim.at(5.0, fleet.workers[0].restart)
    requests = play(fleet, (0.0, "a", 60.0), (6.0, "a", 1.0))
    assert [(request.outcome, request.reason) for request in requests] == [
        (Outcome.FAILED, "the worker restarted"),
        (Outcome.SERVED, ""),
    ]


def test_bytes_that_an_unload_keeps_are_promised_to_nobody() -> None:
    failures = Failures(unreturned=1.0, never_returned=1.0)
    fleet = fleet_of(model("a"), model("b"), budget_bytes=120, failures=failures)
    requests = play(fleet, (0.0, "a", 0.1), (10.0, "b", 0.1), (50.0, "b", 0.1), max_wait_s=30.0)
    truth = fleet.workers[0].operations.truth
    assert truth.unreturned_bytes > 20
    assert requests[1].outcome is not Outcome.SERVED
    assert fleet.workers[0].hub.memory.unreturned_bytes == truth.unreturned_bytes
