"""A machine in virtual time that does at once what the plan of `naru up` says, and what such plans are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_operator.core.desired import DesiredModel, DesiredPool, DesiredState, EngineLimits, Residency, Tier
from naru_operator.core.local_plan import LocalPlan, ObservedWorker, Snapshot, plan
from naru_operator.core.model_plan import KNOWN, Applied, ObservedModel
from naru_operator.core.scaling import Scaling
from naru_proto.registry import ModelRecord

POOL = DesiredPool("p", 1, None, None, 60.0)
ON_DEMAND = Residency(Tier.COLD, idle_ttl_s=600.0)


def pool(num_workers: int, name: str = "p", num_threads: int | None = None) -> DesiredPool:
    return DesiredPool(name, num_workers, num_threads, None, 60.0)


def model(
    name: str,
    uri: str = "pypi://x",
    min_replicas: int = 1,
    pools: tuple[str, ...] = ("p",),
    residency: Residency | None = None,
    max_replicas: int | None = None,
) -> DesiredModel:
    """As many copies at most as at least, unless it is said."""
    scaling = Scaling(max_replicas=max(1, min_replicas) if max_replicas is None else max_replicas)
    limits = EngineLimits()
    return DesiredModel(name, uri, "", (), min_replicas, pools, limits, residency or Residency(), scaling=scaling)


def desired(*models: DesiredModel, pools: tuple[DesiredPool, ...] = (POOL,)) -> DesiredState:
    return DesiredState(tuple(sorted(models, key=lambda m: m.name)), pools)


@dataclass
class World:
    """A machine that does at once what a plan says."""

    workers: dict[str, tuple[DesiredPool, dict[str, ObservedModel]]] = field(default_factory=dict)
    records: dict[str, ModelRecord] = field(default_factory=dict)
    applied: Mapping[str, Applied] = field(default_factory=dict)
    seen_generations: dict[tuple[str, str], int] = field(default_factory=dict)
    """(worker, model) to the newest generation commanded."""
    refused: dict[str, int] = field(default_factory=dict)

    def snapshot(self, state: DesiredState) -> Snapshot:
        workers = tuple(
            ObservedWorker(w, pool, True, dict(models)) for w, (pool, models) in sorted(self.workers.items())
        )
        return Snapshot(state, workers, dict(self.records), self.applied, dict(self.refused))

    def step(self, state: DesiredState) -> LocalPlan:
        steps = plan(self.snapshot(state), now_s=7)
        self.applied = steps.applied
        for name in steps.delete_records:
            del self.records[name]
        for record in steps.put_records:
            old = self.records.get(record.name)
            # What workers are not told of may change within a generation.
            assert old is None or (record != old and record.generation >= old.generation)
            self.records[record.name] = record
        for unload in steps.unload_models:
            self._command(unload.worker_id, unload.model, unload.generation)
            del self.workers[unload.worker_id][1][unload.model]
        for load in steps.load_models:
            self._command(load.worker_id, load.model, load.generation)
            held = KNOWN if load.residency.tier is Tier.COLD else "ready"
            self.workers[load.worker_id][1][load.model] = ObservedModel(held, load.generation)
        for worker_id in steps.stop_workers:
            del self.workers[worker_id]
            self.seen_generations = {k: v for k, v in self.seen_generations.items() if k[0] != worker_id}
        for start in steps.start_workers:
            assert start.worker_id not in self.workers
            self.workers[start.worker_id] = (start.pool, {})
        return steps

    def _command(self, worker_id: str, name: str, generation: int) -> None:
        # A worker refuses a generation older than it has seen.
        assert generation >= self.seen_generations.get((worker_id, name), 0)
        self.seen_generations[worker_id, name] = generation

    def move(self, worker_id: str, name: str, state: str) -> None:
        """The worker does this by itself: a request came, or memory was short."""
        models = self.workers[worker_id][1]
        models[name] = ObservedModel(state, models[name].generation)

    def settle(self, state: DesiredState) -> None:
        for _ in range(20):
            if self.step(state).is_empty:
                return
        raise AssertionError("the plan never rests")
