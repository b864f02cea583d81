"""The traces policies are compared on, and one run of one policy on one of them. Called by the comparison."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.sim.catalog import EQUAL, GB, MIXED, ModelProfile, SizeClass, make_catalog
from bench.sim.clock import Simulation
from bench.sim.fleet import SimFleet
from bench.sim.policies import Policy
from bench.sim.requests import Outcome
from bench.sim.worker import WorkerSetup
from bench.sim.workload import Arrival, Demand, shifting, zipf
from bench.stats import percentile

from naru_worker.core.hub.config import HubConfig


@dataclass(frozen=True, slots=True)
class Trace:
    """Models, workers and how requests come."""

    name: str
    title: str
    """For people."""
    classes: tuple[SizeClass, ...]
    num_models: int
    num_workers: int
    budget_bytes: int
    host_budget_bytes: int
    demand: Demand
    make: Callable[[int, Demand, random.Random], list[Arrival]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy did on one trace."""

    policy: str
    trace: str
    hit_rate: float
    """Share of requests that found their model serving."""
    hit_rates: tuple[float, ...]
    """The same by seed."""
    wait_mean_s: float
    wait_p99_s: float
    """A request that was not served counts with its whole patience."""
    loaded_gb: float
    num_loads: int
    num_evictions: int
    num_served: int
    num_rejected: int
    num_expired: int


_DEMAND = Demand(num_requests=3000, rate_per_s=1.0, mean_duration_s=2.0, max_wait_s=60.0)


def _shift(num_models: int, demand: Demand, rng: random.Random) -> list[Arrival]:
    return shifting(num_models, demand, rng, period_s=600.0, shift=0.05)


TRACES = (
    Trace("equal", "equal sizes", EQUAL, 150, 2, 40 * GB, 80 * GB, _DEMAND, zipf),
    Trace("mixed", "mixed sizes and reload costs", MIXED, 150, 2, 40 * GB, 80 * GB, _DEMAND, zipf),
    Trace("shifting", "popularity shifts every ten minutes", MIXED, 150, 2, 40 * GB, 80 * GB, _DEMAND, _shift),
)


def run_trace(trace: Trace, policy: Policy, seeds: Sequence[int]) -> Figures:
    """One run for each seed, their requests taken together.

    Models and requests depend on the seed alone, so every policy meets the same ones.

    Raises:
        InvariantViolation: something did not hold on the way.
    """
    return _figures(trace, policy, [_run(trace, policy, seed) for seed in seeds])


def _run(trace: Trace, policy: Policy, seed: int) -> SimFleet:
    rng = random.Random(seed)
    catalog = make_catalog(trace.num_models, trace.classes, rng)
    arrivals = trace.make(trace.num_models, trace.demand, rng)
    sim = Simulation(seed)
    fleet = SimFleet(sim, [_setup(trace, policy)] * trace.num_workers)
    adapted = [adapt(profile, policy, trace.budget_bytes) for profile in catalog]
    fleet.deploy(adapted)
    fleet.put_on_disk(adapted)
    fleet.send(arrivals, adapted)
    sim.run(arrivals[-1].time_s)
    fleet.settle()
    return fleet


def adapt(profile: ModelProfile, policy: Policy, budget_bytes: int) -> ModelProfile:
    """A model as a policy sees it: with its keep-alive, and with the whole budget for itself where only one may be."""
    residency = dataclasses.replace(
        profile.residency, idle_ttl_s=policy.idle_ttl_s, min_residency_s=policy.min_residency_s
    )
    if not policy.is_exclusive:
        return dataclasses.replace(profile, residency=residency)
    own = profile.footprint
    private_bytes = budget_bytes - own.weight_bytes - own.kv_floor_bytes - own.workspace_bytes
    footprint = dataclasses.replace(own, private_bytes=private_bytes)
    return dataclasses.replace(profile, residency=residency, footprint=footprint)


def _setup(trace: Trace, policy: Policy) -> WorkerSetup:
    config = HubConfig(trace.budget_bytes, trace.host_budget_bytes)
    if policy.is_exclusive:
        # One that fills the budget is above every watermark, and a guard would only hold up the next one.
        config = dataclasses.replace(config, high_watermark=1.0, low_watermark=1.0, guard_loads=0.0, fair_wait_s=0.0)
    return WorkerSetup(config, choose=policy.choose, is_strict=False)


def _figures(trace: Trace, policy: Policy, fleets: Sequence[SimFleet]) -> Figures:
    requests = [request for fleet in fleets for request in fleet.requests]
    workers = [worker for fleet in fleets for worker in fleet.workers]
    waits_s = [request.wait_s for request in requests]
    ends = Counter(request.outcome for request in requests)
    hit_rates = tuple(sum(r.found_loaded for r in fleet.requests) / len(fleet.requests) for fleet in fleets)
    return Figures(
        policy=policy.name,
        trace=trace.name,
        hit_rate=sum(hit_rates) / len(hit_rates),
        hit_rates=hit_rates,
        wait_mean_s=sum(waits_s) / len(waits_s),
        wait_p99_s=percentile(waits_s, 99),
        loaded_gb=sum(worker.operations.loaded_bytes for worker in workers) / GB,
        num_loads=sum(worker.operations.num_loads for worker in workers),
        num_evictions=sum(worker.tally.num_evictions for worker in workers),
        num_served=ends[Outcome.SERVED],
        num_rejected=ends[Outcome.FAILED],
        num_expired=ends[Outcome.EXPIRED],
    )
