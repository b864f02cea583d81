"""Small random scenarios: few workers and models, tens of requests, commands and failures. Called by tests and by hand.

A scenario is a plain value drawn from a generator; running it twice gives the same trace. `python -m bench.sim
--scenario SEED` prints the trace of one.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from bench.sim.catalog import ModelProfile
from bench.sim.clock import InvariantViolation, Simulation
from bench.sim.fleet import SimFleet
from bench.sim.machine import NO_FAILURES, Failures, Machine
from bench.sim.requests import Outcome
from bench.sim.worker import WorkerSetup
from bench.sim.workload import Arrival, Demand, alternating, bursts, zipf

from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask, Release
from naru_worker.core.hub.model import Footprint, Residency, Tier

UNIT = 1000
"""Bytes of the smallest model; speeds are such that it loads in a fraction of a second."""
FAST = Machine(fetch_bytes_per_s=4 * UNIT, host_bytes_per_s=8 * UNIT, load_bytes_per_s=40 * UNIT, fixed_s=0.02)
CHANCES = (0.0, 0.0, 0.1, 0.3, 0.6)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, or a worker's restart, at a time."""

    time_s: float
    model: int
    ask: Ask | None = None
    release: Release | None = None
    revision: int = 0
    """Index into the revisions of the model: what the Ask carries."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on."""

    seed: int
    setups: tuple[WorkerSetup, ...]
    catalog: tuple[ModelProfile, ...]
    revisions: tuple[ModelProfile, ...]
    """By model: the same name with other files."""
    arrivals: tuple[Arrival, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to."""

    digest: str
    trace: tuple[str, ...]
    outcomes: dict[Outcome, int]
    num_events: int
    num_loads: int
    num_evictions: int
    num_restarts: int


def draw_scenario(rng: random.Random) -> Scenario:
    """Any scenario may come out; the generator decides all of it."""
    num_models = rng.randint(2, 12)
    is_pinned = rng.random() < 0.08
    catalog = tuple(_draw_model(index, rng, is_pinned) for index in range(num_models))
    revisions = tuple(
        dataclasses.replace(
            profile,
            footprint=dataclasses.replace(
                profile.footprint, weights_key=f"{profile.name}@2", weight_bytes=rng.randint(1, 6) * UNIT
            ),
        )
        for profile in catalog
    )
    setups = tuple(_draw_setup(catalog, rng) for _ in range(rng.randint(1, 3)))
    arrivals = tuple(_draw_arrivals(num_models, rng))
    end_s = arrivals[-1].time_s
    targets = rng.sample(range(num_models), min(num_models, rng.randint(1, 4)))
    times = sorted(end_s * rng.random() * 1.2 for _ in range(rng.randint(0, 16)))
    steps = [_draw_step(catalog, revisions, time_s, index, targets, rng) for index, time_s in enumerate(times)]
    return Scenario(rng.getrandbits(32), setups, catalog, revisions, arrivals, tuple(steps))


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed."""
    return draw_scenario(random.Random(seed))


def run_scenario(scenario: Scenario, *, keep_trace: bool = False) -> Report:
    """Runs it to its end and beyond, until all is settled.

    Raises:
        InvariantViolation: something did not hold.
    """
    sim = Simulation(scenario.seed, keep_trace=keep_trace)
    fleet = SimFleet(sim, scenario.setups)
    try:
        _run(sim, fleet, scenario)
    except InvariantViolation as violation:
        violation.add_note("\n".join(sim.trace[-40:]))
        raise
    outcomes = {outcome: 0 for outcome in Outcome}
    for request in fleet.requests:
        if request.outcome is not None:
            outcomes[request.outcome] += 1
    return Report(
        sim.digest(),
        tuple(sim.trace),
        outcomes,
        sim.num_events,
        sum(worker.operations.num_loads for worker in fleet.workers),
        sum(worker.tally.num_evictions for worker in fleet.workers),
        sum(worker.tally.num_restarts for worker in fleet.workers),
    )


def _run(sim: Simulation, fleet: SimFleet, scenario: Scenario) -> None:
    fleet.deploy(scenario.catalog)
    fleet.send(scenario.arrivals, scenario.catalog)
    for step in scenario.steps:
        sim.at(step.time_s, lambda step=step: _take(fleet, scenario, step))  # type: ignore[misc]
    sim.run(max(scenario.arrivals[-1].time_s, scenario.steps[-1].time_s if scenario.steps else 0.0))
    fleet.settle()


def _take(fleet: SimFleet, scenario: Scenario, step: Step) -> None:
    worker = fleet.worker_of(scenario.catalog[step.model].name)
    if step.ask is not None:
        profiles = scenario.revisions if step.revision else scenario.catalog
        worker.ask(step.ask, profiles[step.model])
    elif step.release is not None:
        worker.release(step.release)
    else:
        worker.restart()


def _draw_model(index: int, rng: random.Random, is_pinned: bool) -> ModelProfile:
    key = f"shared-{rng.randint(0, 1)}" if rng.random() < 0.15 else f"weights-{index}"
    weight_bytes = 3 * UNIT if key.startswith("shared") else rng.randint(1, 6) * UNIT
    footprint = Footprint(
        key, weight_bytes, UNIT // 2, rng.choice((0, UNIT // 4, UNIT // 2)), rng.choice((0, UNIT // 10))
    )
    residency = Residency(
        pinned=is_pinned or rng.random() < 0.05,
        priority=rng.choice((100, 100, 1, 200, 1000)),
        min_residency_s=rng.choice((0.0, 0.0, 1.0, 5.0)),
        idle_ttl_s=rng.choice((0.0, 0.0, 0.0, 2.0)),
        keep_last_copy=rng.random() < 0.2,
    )
    return ModelProfile(
        f"m{index}",
        footprint,
        kv_chunk_bytes=UNIT // 4,
        kv_per_request_bytes=rng.choice((0, UNIT // 4)),
        kv_max_bytes=rng.choice((0, UNIT, 3 * UNIT)),
        residency=residency,
        wishes_active=rng.random() < 0.2,
    )


def _draw_setup(catalog: tuple[ModelProfile, ...], rng: random.Random) -> WorkerSetup:
    config = HubConfig(
        budget_bytes=rng.randint(3, 20) * UNIT,
        host_budget_bytes=rng.choice((0, 5, 20)) * UNIT,
        high_watermark=rng.choice((0.8, 0.8, 1.0)),
        low_watermark=rng.choice((0.7, 0.3)),
        max_loads=rng.randint(1, 3),
        max_fetches=rng.randint(1, 4),
        guard_loads=rng.choice((0.0, 5.0)),
        fair_wait_s=rng.choice((0.0, 1.0)),
    )
    return WorkerSetup(config, FAST, _draw_failures(rng) if rng.random() < 0.6 else NO_FAILURES)


def _draw_failures(rng: random.Random) -> Failures:
    return Failures(
        fetch=rng.choice(CHANCES),
        host=rng.choice(CHANCES),
        load=rng.choice(CHANCES),
        is_permanent=rng.choice(CHANCES),
        hang=rng.choice(CHANCES) / 2,
        load_timeout_s=5.0,
        unreturned=rng.choice(CHANCES),
        never_returned=rng.choice((0.0, 0.3)),
        slow_unload=rng.choice(CHANCES),
    )


def _draw_arrivals(num_models: int, rng: random.Random) -> list[Arrival]:
    demand = Demand(
        num_requests=rng.randint(1, 30),
        rate_per_s=rng.choice((0.5, 2.0, 10.0)),
        mean_duration_s=rng.choice((0.1, 1.0, 4.0)),
        max_wait_s=rng.choice((1.0, 10.0, float("inf"))),
    )
    kind = rng.randrange(3)
    if kind == 0:
        return zipf(num_models, demand, rng)
    if kind == 1:
        return bursts(num_models, demand, rng, mean_size=4.0)
    return alternating(rng.sample(range(num_models), 2), demand, rng)


def _draw_step(
    catalog: tuple[ModelProfile, ...],
    revisions: tuple[ModelProfile, ...],
    time_s: float,
    index: int,
    targets: list[int],
    rng: random.Random,
) -> Step:
    """Few models get all commands, so that commands meet; most of them are newer than the one before."""
    model = rng.choice(targets)
    name, generation = catalog[model].name, max(0, 2 + index + rng.randint(-2, 1))
    kind = rng.random()
    token = rng.choice((0, 0, 1, 2))
    if kind < 0.12:
        return Step(time_s, model)
    if kind < 0.55:
        revision = rng.randrange(2)
        spec = (revisions if revision else catalog)[model].spec
        tier = rng.choice((Tier.ACTIVE, Tier.ACTIVE, Tier.HOST, Tier.COLD))
        ask = Ask(name, generation, spec, tier, token, catalog[model].residency, rng.random() < 0.5)
        return Step(time_s, model, ask=ask, revision=revision)
    tier_or_none = rng.choice((None, None, Tier.COLD, Tier.HOST))
    return Step(time_s, model, release=Release(name, generation, token, tier_or_none, rng.choice((0.0, 1.0, 10.0))))
