"""Where a model that is up nowhere comes up: Naru's real placement, and others' rules. Called by the placed fleet.

Sources: KServe ModelMesh, https://github.com/kserve/modelmesh (placement of a cache miss); AIBrix's ModelClaim,
https://github.com/vllm-project/aibrix (ranking of pods); KubeAI, https://github.com/kubeai-project/kubeai (a pod
for each model); all in words and code of our own. Left out: ModelMesh's churn threshold, labels and busy instances
(none is, below 100 requests a minute); second copies in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.sim.catalog import ModelProfile
from bench.sim.placement import HashRing
from bench.sim.worker import SimWorker

from naru_proto.placement import Held, HeldState, Near, Want, WorkerSlot, choose_load
from naru_worker.core.hub.model import ModelEntry
from naru_worker.core.residency import ModelState

LRU_NEAR_S = 45.0
LRU_NEAR_SHARE = 0.1
FREE_NEAR_SHARE = 0.25
FEW_MODELS, MODELS_NEAR_RATIO = 10, 1.25
_STATES = {
    ModelState.READY: HeldState.READY,
    ModelState.ACTIVE: HeldState.READY,
    ModelState.LOADING: HeldState.COMING,
    ModelState.FETCHING: HeldState.COMING,
}


class Chooser(Protocol):
    """Chooses a worker for a model that is up nowhere."""

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """Index of the worker."""
        ...


@dataclass(frozen=True, slots=True)
class Instance:
    """What ModelMesh and ModelClaim look at of one worker."""

    index: int
    free_bytes: int
    num_models: int
    oldest_s: float
    """When the longest unused model of it was used last."""


def instance_of(index: int, worker: SimWorker) -> Instance:
    """Of a worker as it is now."""
    memory = worker.hub.memory
    held = [entry for entry in worker.hub.residents() if entry.state in _STATES]
    oldest_s = min((entry.last_used_s for entry in held), default=0.0)
    return Instance(index, memory.budget_bytes - memory.used_bytes, len(held), oldest_s)


class NaruPlacement:
    """`naru_proto.placement.choose_load`, on facts as leases carry them."""

    def __init__(self, workers: Sequence[SimWorker]) -> None:
        self._workers = workers

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """What a router decides that holds the load lease of a cold model."""
        footprint = model.footprint
        num_bytes = footprint.weight_bytes + footprint.kv_floor_bytes + footprint.private_bytes
        slots = {worker.name: slot_of(worker, model.name) for worker in self._workers}
        choice = choose_load(Want(model.name, num_bytes=num_bytes), slots.values())
        return next(index for index, worker in enumerate(self._workers) if worker.name == choice.worker_id)


def slot_of(worker: SimWorker, model: str) -> WorkerSlot:
    """A worker as its lease shows it; all images are on its disk."""
    memory = worker.hub.memory
    holding = {entry.name: _held(entry) for entry in worker.hub.residents() if entry.state in _STATES}
    near = Near.HOST if model in worker.operations.truth.in_host else Near.DISK
    return WorkerSlot(
        worker.name,
        budget_bytes=memory.budget_bytes,
        used_bytes=memory.used_bytes,
        host_budget_bytes=memory.host_budget_bytes,
        holding=holding,
        near={} if model in holding else {model: near},
    )


def _held(entry: ModelEntry) -> Held:
    own = entry.footprint
    num_bytes = own.weight_bytes + max(entry.kv_bytes, own.kv_floor_bytes) + own.private_bytes if own else 0
    return Held(
        _STATES[entry.state],
        num_bytes,
        is_booked=entry.state is not ModelState.FETCHING,
        num_in_flight=entry.num_in_flight + entry.num_held,
        last_used_s=1 + int(entry.last_used_s // 60) * 60,
    )


class Hashing:
    """Consistent hashing of the model's name: what Naru's routers do while Redis is away."""

    def __init__(self, workers: Sequence[SimWorker]) -> None:
        self._ring = HashRing([worker.name for worker in workers])

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """Always the same worker."""
        return self._ring.place(model.name)


class ModelMesh:
    """A random one of a shortlist: much free space, else models that nobody used for long."""

    def __init__(self, workers: Sequence[SimWorker], default_bytes: int) -> None:
        self._workers = workers
        self._default_bytes = default_bytes
        self._rng = random.Random(len(workers))

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """By its rules for a cache miss."""
        instances = [instance_of(index, worker) for index, worker in enumerate(self._workers)]
        return self._rng.choice(shortlist(instances, self._default_bytes, now_s)).index


def shortlist(instances: Sequence[Instance], default_bytes: int, now_s: float) -> list[Instance]:
    """Near-equals of the best one: those that are not full go first."""
    roomy = [each for each in instances if each.free_bytes >= default_bytes]
    if not roomy:
        best_s = min(each.oldest_s for each in instances)
        reach_s = max(LRU_NEAR_S, LRU_NEAR_SHARE * (now_s - best_s))
        return [each for each in instances if each.oldest_s <= best_s + reach_s]
    best = min(roomy, key=lambda each: (-each.free_bytes, each.index))
    most_models = max(FEW_MODELS - 1, int(MODELS_NEAR_RATIO * best.num_models))
    near = [each for each in roomy if each.free_bytes >= FREE_NEAR_SHARE * best.free_bytes]
    return [each for each in near if each.num_models <= most_models]


class ModelClaim:
    """AIBrix: bound once, to the pod with the most free memory then; nobody tests that the model fits."""

    def __init__(self, workers: Sequence[SimWorker]) -> None:
        self._workers = workers
        self._bound: dict[str, int] = {}
        self._num_bound = [0] * len(workers)

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """Where it was bound."""
        if model.name not in self._bound:
            instances = [instance_of(index, worker) for index, worker in enumerate(self._workers)]
            best = min(instances, key=lambda each: (-each.free_bytes, self._num_bound[each.index], each.index)).index
            self._bound[model.name] = best
            self._num_bound[best] += 1
        return self._bound[model.name]


class PodPerModel:
    """KubeAI: each model is a pod that has an accelerator to itself. None is free: its pod waits for one."""

    def __init__(self, workers: Sequence[SimWorker]) -> None:
        self._workers = workers
        self._queue = HashRing([worker.name for worker in workers])

    def choose(self, model: ModelProfile, now_s: float) -> int:
        """The first free accelerator."""
        for index, worker in enumerate(self._workers):
            if not any(entry.state is not ModelState.HOST or entry.num_held for entry in worker.hub.residents()):
                return index
        return self._queue.place(model.name)


@dataclass(frozen=True, slots=True)
class PlacementKind:
    """One way to place, by name."""

    name: str
    make: Callable[[Sequence[SimWorker]], Chooser]
    is_exclusive: bool = False
    """One model on each worker, until it is idle for `idle_ttl_s`."""
    idle_ttl_s: float = 0.0
