"""Placements compared on one trace of many models: real hubs, real requests, and who decides where a model comes up.

Called by ``python -m bench.fleet_sim``. It builds on the residency simulator: workers, memory and loads are its own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fleet_sim.placement.choosers import (
    Chooser,
    Hashing,
    ModelClaim,
    ModelMesh,
    NaruPlacement,
    PlacementKind,
    PodPerModel,
)
from bench.sim.catalog import GB, MIXED, ModelProfile, make_catalog
from bench.sim.clock import Simulation
from bench.sim.fleet import SimFleet
from bench.sim.policies import NEVER_S, Policy, choose_nobody
from bench.sim.requests import Outcome
from bench.sim.traces import adapt
from bench.sim.worker import SimWorker, WorkerSetup
from bench.sim.workload import Demand, zipf
from bench.stats import percentile

from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import Ask
from naru_worker.core.hub.eviction import VictimChooser, choose_victims
from naru_worker.core.hub.model import Tier
from naru_worker.core.residency import ModelState

NUM_WORKERS = 8
NUM_MODELS = 200
BUDGET_BYTES = 40 * GB
HOST_BUDGET_BYTES = 80 * GB
DEMAND = Demand(num_requests=6000, rate_per_s=4.0, mean_duration_s=2.0, max_wait_s=60.0)
DEFAULT_BYTES = 5 * GB
"""About a model's mean."""
IDLE_TTL_S = 630.0
"""KubeAI's: its average of ten minutes must come to nothing, and stay so for 30 s."""
_UP = {ModelState.READY, ModelState.ACTIVE, ModelState.LOADING, ModelState.FETCHING}

PLACEMENTS = (
    PlacementKind("Naru", NaruPlacement),
    PlacementKind("Naru without Redis: by name", Hashing),
    PlacementKind("ModelMesh", lambda workers: ModelMesh(workers, DEFAULT_BYTES)),
    PlacementKind("AIBrix ModelClaim", ModelClaim),
    PlacementKind("KubeAI: a pod for each model", PodPerModel, is_exclusive=True, idle_ttl_s=IDLE_TTL_S),
)


@dataclass(frozen=True, slots=True)
class PlacementFigures:
    """What one placement did."""

    name: str
    loads_per_hour: float
    loaded_gb: float
    wait_p50_s: float
    """Of requests that did not find their model serving."""
    wait_p99_s: float
    """Of all; one that was not served counts with its whole patience."""
    wait_mean_s: float
    num_not_served: int
    used_share: float
    """Of all budgets, as arrivals find it."""
    hit_rate: float


class PlacedFleet(SimFleet):
    """Mutable: a fleet all of whose workers know all models; where one comes up is decided when it is up nowhere."""

    def __init__(self, sim: Simulation, setups: Sequence[WorkerSetup], kind: PlacementKind) -> None:
        super().__init__(sim, setups)
        self.used_shares: list[float] = []
        self._chooser: Chooser = kind.make(self.workers)
        self._profiles: dict[str, ModelProfile] = {}

    def deploy(self, catalog: Sequence[ModelProfile], generation: int = 1) -> None:
        """Makes all models known everywhere, with their images on disk."""
        for profile in catalog:
            self._profiles[profile.name] = profile
            ask = Ask(profile.name, generation, profile.spec, Tier.COLD, residency=profile.residency)
            for worker in self.workers:
                worker.ask(ask, profile)
                worker.operations.on_disk.add(profile.footprint.weights_key)

    def worker_of(self, model: str) -> SimWorker:
        """Who serves a request for it now: where it is up or coming up, else where it is to come up."""
        self.used_shares.append(sum(worker.hub.memory.used_bytes for worker in self.workers) / self._budget_bytes)
        up = [worker for worker in self.workers if _is_up(worker, model)]
        if up:
            return max(up, key=lambda worker: _is_serving(worker, model))
        return self.workers[self._chooser.choose(self._profiles[model], self.sim.now_s)]

    @property
    def _budget_bytes(self) -> int:
        return sum(worker.setup.config.budget_bytes for worker in self.workers)


def _is_up(worker: SimWorker, model: str) -> bool:
    entry = worker.hub.entry(model)
    return entry is not None and (entry.state in _UP or entry.num_held > 0)


def _is_serving(worker: SimWorker, model: str) -> bool:
    entry = worker.hub.entry(model)
    return entry is not None and entry.state.is_serving


def compare_placements(
    seed: int, kinds: Sequence[PlacementKind] = PLACEMENTS, demand: Demand = DEMAND, num_models: int = NUM_MODELS
) -> list[PlacementFigures]:
    """Each of them on the same models and requests."""
    return [_figures(kind, run_placement(kind, seed, demand, num_models), demand) for kind in kinds]


def run_placement(kind: PlacementKind, seed: int, demand: Demand, num_models: int) -> PlacedFleet:
    """One of them, to the end of all requests."""
    rng = random.Random(seed)
    catalog = make_catalog(num_models, MIXED, rng)
    arrivals = zipf(num_models, demand, rng)
    config = HubConfig(BUDGET_BYTES, HOST_BUDGET_BYTES)
    choose: VictimChooser = choose_victims
    if kind.is_exclusive:
        config = dataclasses.replace(
            config, high_watermark=1.0, low_watermark=1.0, guard_loads=0.0, fair_wait_s=NEVER_S
        )
        choose = choose_nobody
        policy = Policy(kind.name, choose, idle_ttl_s=kind.idle_ttl_s, min_residency_s=NEVER_S, is_exclusive=True)
        catalog = [adapt(profile, policy, BUDGET_BYTES) for profile in catalog]
    sim = Simulation(seed)
    fleet = PlacedFleet(sim, [WorkerSetup(config, choose=choose, is_strict=False)] * NUM_WORKERS, kind)
    fleet.deploy(catalog)
    fleet.send(arrivals, catalog)
    sim.run(arrivals[-1].time_s)
    fleet.settle()
    return fleet


def _figures(kind: PlacementKind, fleet: PlacedFleet, demand: Demand) -> PlacementFigures:
    waits_s = [request.wait_s for request in fleet.requests]
    missed_s = [request.wait_s for request in fleet.requests if not request.found_loaded]
    num_loads = sum(worker.operations.num_loads for worker in fleet.workers)
    return PlacementFigures(
        kind.name,
        num_loads * 3600.0 * demand.rate_per_s / demand.num_requests,
        sum(worker.operations.loaded_bytes for worker in fleet.workers) / GB,
        percentile(missed_s, 50) if missed_s else 0.0,
        percentile(waits_s, 99),
        sum(waits_s) / len(waits_s),
        sum(request.outcome is not Outcome.SERVED for request in fleet.requests),
        sum(fleet.used_shares) / len(fleet.used_shares),
        sum(request.found_loaded for request in fleet.requests) / len(fleet.requests),
    )
