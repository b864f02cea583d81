"""What to do next on one machine: `plan(snapshot)` compares desired and observed and returns the steps with reasons.

Called by the controller of `naru up`, which carries the steps out and calls again. Planning twice from the state that
a plan leads to gives no steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from naru_operator.core.desired import DRAIN_TIMEOUT_S, DesiredModel, DesiredPool, DesiredState, EngineLimits, Residency
from naru_proto.registry import ModelRecord

Applied = tuple[DesiredModel | None, int]
"""A model as it was last planned, and its generation; None once it is gone. Generations of a name never fall."""

_ABSENT = ("cold", "draining")
"""States in which a worker's model is gone, or as good as gone."""
KNOWN = "known"
"""Not held, and the worker has been told of it in this life: it was asked for on demand, or the worker evicted it. A
request brings it up; loading it again unasked would undo the worker's own decision.
"""


@dataclass(frozen=True, slots=True)
class ObservedModel:
    """One model on one worker, as its lease says, or as a command under way will make it."""

    state: str
    """Lower-case ModelState, or KNOWN."""
    generation: int


@dataclass(frozen=True, slots=True)
class ObservedWorker:
    """A worker process of ours."""

    worker_id: str
    pool: DesiredPool
    """As it was when the process was started."""
    is_registered: bool
    """Whether it holds a lease and is not leaving; only then it takes commands."""
    models: Mapping[str, ObservedModel]


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


@dataclass(frozen=True, slots=True)
class StartWorker:
    """A worker process to start."""

    worker_id: str
    pool: DesiredPool


@dataclass(frozen=True, slots=True)
class LoadModel:
    """A model to bring to a worker; what the worker holds under that name gives way."""

    worker_id: str
    model: str
    uri: str
    revision: str
    generation: int
    limits: EngineLimits
    residency: Residency = field(default_factory=Residency)


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """A model to take off a worker; the worker forgets it."""

    worker_id: str
    model: str
    generation: int
    drain_timeout_s: float


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
    applied = _generations(snapshot)
    puts = _records_to_put(snapshot, applied, now_s, reasons)
    deletes = tuple(sorted(snapshot.records.keys() - {model.name for model in snapshot.desired.models}))
    reasons += [f"forget model {name!r}: no manifest names it" for name in deletes]
    starts, stops = _processes(snapshot, reasons)
    placement = place(snapshot)
    takers = [w for w in snapshot.workers if w.is_registered and w.worker_id not in stops]
    unloads = _unloads(takers, applied, placement, reasons)
    loads = _loads(takers, applied, placement, reasons)
    return LocalPlan(puts, deletes, starts, unloads, loads, stops, applied, tuple(reasons))


def place(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Model to the workers that should hold or know it.

    A model on demand is known to every worker of its pools: being known takes no memory, and the router may then bring
    it up anywhere. The others stay where they are, then go to the workers with the fewest of them; ties go by name.
    """
    members = {pool.name: pool.worker_ids() for pool in snapshot.desired.pools}
    holding = {
        worker.worker_id: {name for name, held in worker.models.items() if held.state not in _ABSENT}
        for worker in snapshot.workers
    }
    models = snapshot.desired.models
    known = {m.name: sorted(w for pool in m.pools for w in members[pool]) for m in models if m.is_on_demand}
    eligible = {m.name: sorted(w for pool in m.pools for w in members[pool]) for m in models if not m.is_on_demand}
    num_copies = {m.name: max(1, m.min_replicas) for m in models}
    # All that stay first: a new model must not move one that is placed.
    placement = {
        name: [w for w in workers if name in holding.get(w, ())][: num_copies[name]]
        for name, workers in eligible.items()
    }
    num_placed = {worker_id: 0 for ids in members.values() for worker_id in ids}
    for worker_id in (w for chosen in placement.values() for w in chosen):
        num_placed[worker_id] += 1
    for name, chosen in placement.items():
        others = sorted((num_placed[w], w) for w in eligible[name] if w not in chosen)
        for _, worker_id in others[: num_copies[name] - len(chosen)]:
            chosen.append(worker_id)
            num_placed[worker_id] += 1
    return {name: tuple(sorted(chosen)) for name, chosen in (placement | known).items()}


def _generations(snapshot: Snapshot) -> dict[str, Applied]:
    """Each model's generation: one more than ever before under that name whenever anything of it changed."""
    result: dict[str, Applied] = {}
    for model in snapshot.desired.models:
        last, planned = snapshot.applied.get(model.name, (None, 0))
        record = snapshot.records.get(model.name)
        seen = max(planned, record.generation if record else 0)
        refused = snapshot.refused.get(model.name, 0)
        # What stands behind a refusing worker's generation is unknown: ours must be newer.
        is_same = last == model and refused <= planned
        result[model.name] = (model, seen if is_same else max(seen, refused) + 1)
    for name, (last, planned) in snapshot.applied.items():
        if name not in result:
            generation = planned if last is None else planned + 1
            result[name] = (None, max(generation, snapshot.refused.get(name, 0)))
    return result


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


def _unloads(
    workers: list[ObservedWorker],
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    reasons: list[str],
) -> tuple[UnloadModel, ...]:
    unloads = []
    for worker in workers:
        for name, held in sorted(worker.models.items()):
            if worker.worker_id in placement.get(name, ()) or held.state in _ABSENT:
                continue
            planned = applied.get(name, (None, 0))[1]
            why = "it belongs on other workers" if name in placement else "no manifest names it"
            unloads.append(UnloadModel(worker.worker_id, name, max(planned, held.generation), DRAIN_TIMEOUT_S))
            reasons.append(f"unload {name!r} from {worker.worker_id!r}: {why}")
    return tuple(unloads)


def _loads(
    workers: list[ObservedWorker],
    applied: Mapping[str, Applied],
    placement: Mapping[str, tuple[str, ...]],
    reasons: list[str],
) -> tuple[LoadModel, ...]:
    loads: list[LoadModel] = []
    for worker in workers:
        for name, (model, generation) in sorted(applied.items()):
            if model is None or worker.worker_id not in placement[name]:
                continue
            held = worker.models.get(name)
            if held is not None and held.state == "draining":
                continue  # its lease says when it is gone; then it is planned again
            if held is not None and held.state != "cold" and held.generation >= generation:
                # Known, loaded, on its way, or failed: that waits for a request, another manifest or a new process.
                continue
            loads.append(_load(worker.worker_id, model, generation))
            step = "make known" if model.is_on_demand else "load"
            why = _why_load(model, held)
            reasons.append(f"{step} {name!r} in generation {generation} on {worker.worker_id!r}: {why}")
    return tuple(loads)


def _load(worker_id: str, model: DesiredModel, generation: int) -> LoadModel:
    return LoadModel(worker_id, model.name, model.uri, model.revision, generation, model.limits, model.residency)


def _why_load(model: DesiredModel, held: ObservedModel | None) -> str:
    if held is None:
        return "it does not know it" if model.is_on_demand else "it does not hold it"
    return f"it {'knows' if held.state == KNOWN else 'holds'} generation {held.generation}"
