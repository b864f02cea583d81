"""What to do next on one machine: `plan(snapshot)` compares desired and observed and returns the steps with reasons.

Called by the controller of `naru up`, which carries the steps out and calls again. Planning twice from the state that
a plan leads to gives no steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_operator.core import placement
from naru_operator.core.desired import DRAIN_TIMEOUT_S, DesiredPool, DesiredState
from naru_operator.core.generations import next_generations
from naru_operator.core.model_plan import Applied, LoadModel, ObservedModel, UnloadModel
from naru_operator.core.model_steps import load_steps, unload_steps
from naru_operator.core.placement import NO_FACTS, PlacementFacts
from naru_operator.core.record_parts import with_parts
from naru_proto.placement import WorkerSlot
from naru_proto.placement import place as placement_of
from naru_proto.registry import ModelRecord, WorkerRecord


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker process of ours."""

    worker_id: str
    pool: DesiredPool
    """As it was when the process was started."""
    is_registered: bool
    """Whether it holds a lease and is not leaving; only then it takes commands."""
    models: Mapping[str, ObservedModel]
    record: WorkerRecord | None = None
    """Its lease; None: it has none yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a plan may depend on."""

    desired: DesiredState
    workers: tuple[ObservedWorker, ...]
    records: Mapping[str, ModelRecord]
    """The registry as it stands."""
    applied: Mapping[str, Applied]
    """The last plan's `applied`; empty at the start."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Model to the newest generation that a worker named when it refused one of ours as stale."""
    facts: PlacementFacts = NO_FACTS


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A worker process to start."""

    worker_id: str
    pool: DesiredPool


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """Steps in the order to take them, field by field; `reasons` has one line for each."""

    put_records: tuple[ModelRecord, ...] = ()
    delete_records: tuple[str, ...] = ()
    start_workers: tuple[StartWorker, ...] = ()
    unload_models: tuple[UnloadModel, ...] = ()
    load_models: tuple[LoadModel, ...] = ()
    stop_workers: tuple[str, ...] = ()
    applied: Mapping[str, Applied] = field(default_factory=dict)
    """For the next snapshot."""
    reasons: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.reasons


def plan(snapshot: Snapshot, *, now_s: int) -> LocalPlan:
    """The steps from observed to desired; ``now_s`` (Unix seconds) dates new records."""
    reasons: list[str] = []
    applied = next_generations(snapshot.desired.models, snapshot.records, snapshot.applied, snapshot.refused)
    puts = _records_to_put(snapshot, applied, now_s, reasons)
    deletes = tuple(sorted(snapshot.records.keys() - {model.name for model in snapshot.desired.models}))
    reasons += [f"forget model {name!r}: no manifest names it" for name in deletes]
    starts, stops = _processes(snapshot, reasons)
    where = place(snapshot)
    takers = {w.worker_id: w.models for w in snapshot.workers if w.is_registered and w.worker_id not in stops}
    unloads = unload_steps(takers, applied, where.copies, lambda _: DRAIN_TIMEOUT_S, reasons, known=where.known)
    loads = load_steps(takers, applied, where.copies, reasons, known=where.known)
    return LocalPlan(puts, deletes, starts, unloads, loads, stops, applied, tuple(reasons))


@dataclass(frozen=True, slots=True)
class Where:
    """Model to its workers."""

    copies: Mapping[str, tuple[str, ...]]
    """That should hold it, or know it where requests alone load it."""
    known: Mapping[str, tuple[str, ...]]
    """That are told of it beside those: further copies may come up there."""


def place(snapshot: Snapshot) -> Where:
    """Where models belong, by the placement that the routers' keeper asks too.

    A model on demand is known to every worker of its pools: being known takes no memory, and a router may then bring it
    up anywhere. One that fits nowhere is known as well: requests bring it up.
    """
    slots = _slots(snapshot)
    sizes = {model.name: placement.size_of(model.name, snapshot.facts) for model in snapshot.desired.models}
    wants = [
        placement.want(model, model.pools, max(1, model.min_replicas), sizes[model.name])
        for model in snapshot.desired.models
        if not model.is_on_demand
    ]
    placed = placement_of(wants, slots)
    unplaced = {each.model for each in placed.unplaced}
    copies: dict[str, tuple[str, ...]] = {}
    known: dict[str, tuple[str, ...]] = {}
    for model in snapshot.desired.models:
        everywhere = tuple(slot.worker_id for slot in slots if slot.pool in model.pools)
        copies[model.name] = everywhere if model.is_on_demand else placed.workers(model.name)
        num_copies, most = max(1, model.min_replicas), model.scaling.max_replicas
        others = tuple(worker_id for worker_id in everywhere if worker_id not in copies[model.name])
        is_nowhere = model.name in unplaced and not copies[model.name]
        if others and (is_nowhere or placement.may_grow(num_copies, most)):
            known[model.name] = others
    return Where(copies, known)


def _slots(snapshot: Snapshot) -> list[WorkerSlot]:
    """All workers that there are to be; those that do not run yet are empty."""
    workers = {worker.worker_id: worker for worker in snapshot.workers}
    sizes = {model.name: placement.size_of(model.name, snapshot.facts) for model in snapshot.desired.models}
    slots = []
    for pool in snapshot.desired.pools:
        for worker_id in pool.worker_ids():
            worker = workers.get(worker_id)
            record = worker.record if worker is not None else None
            if record is None:
                budget_bytes = pool.memory_budget_bytes or 0
                record = WorkerRecord(worker_id, "", "", {}, pool=pool.name, budget_bytes=budget_bytes)
            # One that leaves is started anew under its name: its models wait for it.
            record = dataclasses.replace(record, pool=pool.name, leaving=False, draining=False)
            models = worker.models if worker is not None else {}
            slots.append(placement.worker_slot(record, models, snapshot.facts, sizes, snapshot.records))
    return sorted(slots, key=lambda slot: slot.worker_id)


def _records_to_put(
    snapshot: Snapshot, applied: Mapping[str, Applied], now_s: int, reasons: list[str]
) -> tuple[ModelRecord, ...]:
    puts = []
    for model in snapshot.desired.models:
        generation = applied[model.name][1]
        old = snapshot.records.get(model.name)
        record = ModelRecord(
            name=model.name,
            uri=model.uri,
            generation=generation,
            revision=model.revision,
            aliases=model.aliases,
            min_replicas=model.min_replicas,
            on_demand=model.is_on_demand,
            created_s=old.created_s if old else now_s,
            pools=model.pools,
        )
        record = with_parts(record, model.traffic, model.scaling)
        if record != old:
            puts.append(record)
            why = "it changed" if old else "it is new"
            reasons.append(f"register model {model.name!r} in generation {generation}: {why}")
    return tuple(puts)


def _processes(snapshot: Snapshot, reasons: list[str]) -> tuple[tuple[StartWorker, ...], tuple[str, ...]]:
    existing = {worker.worker_id: worker for worker in snapshot.workers}
    wanted = {worker_id: pool for pool in snapshot.desired.pools for worker_id in pool.worker_ids()}
    starts = tuple(StartWorker(worker_id, pool) for worker_id, pool in wanted.items() if worker_id not in existing)
    for start in starts:
        reasons.append(f"start worker {start.worker_id!r}: pool {start.pool.name!r} has {start.pool.num_workers}")
    stops = sorted(existing.keys() - wanted.keys())
    reasons += [f"stop worker {worker_id!r}: no pool has it" for worker_id in stops]
    outdated = sorted(
        worker_id
        for worker_id, pool in wanted.items()
        if worker_id in existing and _differs(existing[worker_id].pool, pool)
    )
    # One at a time, and only while all others serve: the models stay reachable where they have a second copy.
    if outdated and not starts and all(worker.is_registered for worker in snapshot.workers):
        stops.append(outdated[0])
        reasons.append(f"stop worker {outdated[0]!r}, to start it anew: its pool's settings changed")
    return starts, tuple(stops)


def _differs(started: DesiredPool, wanted: DesiredPool) -> bool:
    """Whether a process started for the one cannot serve as the other."""
    kept = dataclasses.replace(started, num_workers=wanted.num_workers, drain_timeout_s=wanted.drain_timeout_s)
    return kept != wanted
