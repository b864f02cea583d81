"""All policies on all traces, the hub's own decision time, and one large fleet. Called by ``python -m bench.sim``."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.catalog import GB, MIXED, make_catalog
from bench.sim.clock import Simulation
from bench.sim.fleet import SimFleet
from bench.sim.policies import POLICIES, Policy
from bench.sim.requests import Outcome
from bench.sim.traces import TRACES, Figures, Trace, run_trace
from bench.sim.worker import WorkerSetup
from bench.sim.workload import Demand, zipf
from bench.stats import percentile

from naru_worker.core.hub.config import HubConfig


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Seconds of single calls of the hub: on the clock, and of CPU, which other processes do not disturb."""

    num_known_models: int
    num_decisions: int
    decision_p50_s: float
    decision_p99_s: float
    decision_max_s: float
    decision_cpu_p99_s: float
    wake_p99_s: float
    """Of asking the hub when to be woken, which a worker does after each decision."""


@dataclass(frozen=True, slots=True)
class FleetRun:
    """One simulation of many workers."""

    num_workers: int
    num_models: int
    num_requests: int
    num_served: int
    num_loads: int
    num_evictions: int
    num_events: int
    wall_s: float


def compare(
    seeds: Sequence[int], traces: Sequence[Trace] = TRACES, policies: Sequence[Policy] = POLICIES
) -> list[Figures]:
    """Every policy on every trace, with the same models and requests."""
    return [run_trace(trace, policy, seeds) for trace in traces for policy in policies]


def measure_decisions(seed: int, num_models: int = 10_000, num_requests: int = 4000) -> DecisionTimes:
    """One worker that knows so many models and has room for a few dozen of them."""
    fleet = _run_fleet(seed, 1, num_models, Demand(num_requests, 4.0), 120 * GB, times_decisions=True)
    tally = fleet.workers[0].tally
    # What deploys the models is the start, not the steady state that is asked for.
    wall_s, cpu_s = zip(*tally.decision_s[num_models:], strict=True)
    return DecisionTimes(
        num_models,
        len(wall_s),
        decision_p50_s=percentile(wall_s, 50),
        decision_p99_s=percentile(wall_s, 99),
        decision_max_s=max(wall_s),
        decision_cpu_p99_s=percentile(cpu_s, 99),
        wake_p99_s=percentile([wall_s for wall_s, _ in tally.wake_s[num_models:]], 99),
    )


def run_fleet(seed: int, num_workers: int = 64, num_models: int = 5000, num_requests: int = 20_000) -> FleetRun:
    """Thousands of models on many workers, as one process."""
    started_s = time.perf_counter()
    fleet = _run_fleet(seed, num_workers, num_models, Demand(num_requests, 0.6 * num_workers), 40 * GB)
    return FleetRun(
        num_workers,
        num_models,
        num_requests,
        sum(request.outcome is Outcome.SERVED for request in fleet.requests),
        sum(worker.operations.num_loads for worker in fleet.workers),
        sum(worker.tally.num_evictions for worker in fleet.workers),
        fleet.sim.num_events,
        time.perf_counter() - started_s,
    )


def _run_fleet(
    seed: int, num_workers: int, num_models: int, demand: Demand, budget_bytes: int, *, times_decisions: bool = False
) -> SimFleet:
    rng = random.Random(seed)
    catalog = make_catalog(num_models, MIXED, rng)
    arrivals = zipf(num_models, demand, rng)
    setup = WorkerSetup(HubConfig(budget_bytes, 2 * budget_bytes), is_strict=False)
    sim = Simulation(seed)
    fleet = SimFleet(sim, [setup] * num_workers, times_decisions=times_decisions)
    fleet.deploy(catalog)
    fleet.send(arrivals, catalog)
    sim.run(arrivals[-1].time_s)
    fleet.settle()
    return fleet
