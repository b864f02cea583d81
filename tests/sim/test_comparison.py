"""The comparison in small: each policy does what its name says, on the same requests."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from bench.sim.comparison import compare, measure_decisions, run_fleet
from bench.sim.policies import POLICIES
from bench.sim.traces import TRACES, Figures

SMALL = tuple(
    dataclasses.replace(
        trace, num_models=40, num_workers=1, demand=dataclasses.replace(trace.demand, num_requests=300, rate_per_s=0.5)
    )
    for trace in TRACES
)


@functools.cache
def figures() -> dict[tuple[str, str], Figures]:
    return {(row.trace, row.policy): row for row in compare([3], SMALL)}


def test_every_policy_runs_on_every_trace_and_accounts_for_every_request() -> None:
    assert len(figures()) == len(POLICIES) * len(SMALL)
    for row in figures().values():
        assert row.num_served + row.num_rejected + row.num_expired == 300
        assert 0.0 <= row.hit_rate <= 1.0
        assert row.num_loads > 0


def test_the_same_seed_gives_the_same_figures() -> None:
    assert compare([3], SMALL[:1], POLICIES[:2]) == [figures()["equal", "Naru"], figures()["equal", "LRU"]]


@pytest.mark.parametrize("trace", [trace.name for trace in TRACES])
def test_one_model_at_a_time_loads_most_and_hits_least(trace: str) -> None:
    exclusive, ours = figures()[trace, "exclusive slot"], figures()[trace, "Naru"]
    assert exclusive.hit_rate < ours.hit_rate


def test_the_hub_times_its_decisions_among_many_known_models() -> None:
    times = measure_decisions(3, num_models=500, num_requests=100)
    assert times.num_decisions >= 200
    assert 0.0 < times.decision_p50_s <= times.decision_p99_s <= times.decision_max_s


def test_a_fleet_of_many_workers_serves() -> None:
    run = run_fleet(3, num_workers=8, num_models=200, num_requests=300)
    assert run.num_served == pytest.approx(300, abs=60)
    assert run.num_events > 900
