"""Where a request goes when no worker has its model ready: to one that will have it soon, or to one that is to load it.

A worker holds requests for the models it knows and starts them when the model is there. So a request is sent as soon as
some worker may know the model; one that does not says so, and another is asked. For a model that nobody holds, equal
routers must choose the same worker. The load desk sees to that (`placed_at`); without Redis it is consistent hashing of
the model's name, bounded by how many models a router has coming up on each worker, and once a request waits somewhere,
those that follow wait there too.

Pure: the same candidates and request give the same placement. The fleet makes the candidates, the dispatcher sends.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from naru_proto.registry import ModelRecord, WorkerRecord
from naru_router.core.routing.model import Decision
from naru_router.core.routing.ring import bounded_hash, route_key


class Nearness(enum.IntEnum):
    """How soon a worker can serve a model, soonest first."""

    READY = 0
    LOADING = 1
    HOST = 2
    """In host memory: a request brings it up."""
    FETCHING = 3
    """Its files are on their way."""
    UNLISTED = 4
    """The lease does not show it, or shows that it left: if the worker knows it, a request brings it up."""
    FAILED = 5
    """Its last load failed: the worker says why, or tries again."""
    OUTDATED = 6
    """It has an older generation on its way and will be told of the newer one."""


_NEARNESS = {
    "ready": Nearness.READY,
    "loading": Nearness.LOADING,
    "host": Nearness.HOST,
    "fetching": Nearness.FETCHING,
    "cold": Nearness.UNLISTED,
    "draining": Nearness.UNLISTED,
    "failed": Nearness.FAILED,
}
_UNDER_WAY = (Nearness.READY, Nearness.LOADING, Nearness.FETCHING)
"""Nobody has to be asked to load anything."""
_WHY = {
    Nearness.LOADING: "held there until it is loaded",
    Nearness.HOST: "asked to load it from host memory",
    Nearness.FETCHING: "held there until it is fetched and loaded",
    Nearness.UNLISTED: "asked to load it",
    Nearness.FAILED: "asked to try again",
}


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that can serve the request now or later."""

    worker_id: str
    nearness: Nearness
    num_in_flight: int
    """Requests this router has open there."""
    num_rising: int = 0
    """Models that requests of this router wait for there."""
    num_held: int = 0
    """Requests for this model that this router has waiting there."""
    is_leaving: bool = False
    """It serves for a while yet, and is to be asked when no other can."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The worker, why, and what to expect."""

    decision: Decision
    is_held: bool
    """The worker will hold the request until the model is loaded, or say that it does not know it."""
    is_raising: bool = False
    """Nobody has the model ready or on its way: the worker, chosen by the model's name, would be asked to load it."""


@dataclass(frozen=True, slots=True)
class RingSettings:
    """See core.routing."""

    load_factor: float
    num_virtual_nodes: int


def nearness(worker: WorkerRecord, model: ModelRecord) -> Nearness | None:
    """How near a worker is to serving a model; None: it takes no requests, or none for this model.

    A copy that serves is taken whatever its generation: it goes on until its successor is there.
    """
    if worker.draining:
        return None
    resident = worker.models.get(model.name)
    if resident is None:
        return Nearness.UNLISTED if not model.pools or worker.pool in model.pools else None
    found = _NEARNESS.get(resident.state)
    is_outdated = found not in (None, Nearness.READY) and resident.generation < model.generation
    return Nearness.OUTDATED if is_outdated else found


def place(
    candidates: Sequence[Holder], model: str, key: bytes, ring: RingSettings, *, may_raise: bool
) -> Placement | None:
    """Picks the worker; None where none is near enough.

    Args:
        candidates: with distinct ids, in any order.
        model: the model's own name.
        key: see core.routing.model.RouteRequest.
        ring: how requests are spread.
        may_raise: whether a worker may be asked to bring the model up.
    """
    able = [each for each in candidates if each.nearness is not Nearness.OUTDATED]
    able = [each for each in able if may_raise or each.nearness in _UNDER_WAY]
    if not able:
        return None
    best = min(_rank(each) for each in able)
    nearest = [each for each in able if _rank(each) == best]
    near = nearest[0].nearness
    if near in _UNDER_WAY:
        loads = {each.worker_id: each.num_in_flight for each in nearest}
        decision = _route(loads, key, ring)
    else:
        chosen = [each for each in nearest if each.num_held] or nearest
        loads = {each.worker_id: each.num_rising for each in chosen}
        decision = _route(loads, route_key(model, ()), ring)
    if near is Nearness.READY:
        return Placement(decision, is_held=False)
    reasons = (_WHY[near], *decision.reasons)
    told = Decision(decision.worker_id, decision.capacity, decision.num_skipped, reasons)
    return Placement(told, is_held=True, is_raising=near not in _UNDER_WAY)


def placed_at(candidates: Sequence[Holder], worker_id: str, why: str) -> Placement | None:
    """The placement on a worker where the model is brought up for all routers; None: it is no candidate now."""
    near = next((each.nearness for each in candidates if each.worker_id == worker_id), None)
    if near is None or near is Nearness.OUTDATED:
        return None
    return Placement(Decision(worker_id, 0, 0, (_WHY.get(near, "it is ready there"), why)), is_held=True)


def _rank(holder: Holder) -> tuple[bool, bool, bool, Nearness]:
    """Best first: what serves now, then what will; those that stay before those that leave; nearest first.

    One whose load has failed takes the request only to refuse it, most likely: even one that leaves does better.
    """
    near = holder.nearness
    return near is not Nearness.READY, near is Nearness.FAILED, holder.is_leaving, near


def _route(loads: Mapping[str, int], key: bytes, ring: RingSettings) -> Decision:
    return bounded_hash(loads, key, load_factor=ring.load_factor, num_virtual_nodes=ring.num_virtual_nodes)


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker said that it does not know a model; believed while its lease shows nothing new about that."""

    num_known: int
    state: str
    """The model's, as the lease had it; empty: not at all."""
    model_epoch: int = 0
    """Grows with each unload: tells the copy from a later one."""

    @property
    def was_ready(self) -> bool:
        """The lease was behind: the worker had let the model go."""
        return self.state == "ready"

    def holds_for(self, worker: WorkerRecord, model: str) -> bool:
        """Whether the worker's lease gives no reason to ask again."""
        now = absence(worker, model)
        if self.was_ready:
            return (now.state, now.model_epoch) == (self.state, self.model_epoch)
        return (now.state, now.num_known) == (self.state, self.num_known)


def absence(worker: WorkerRecord, model: str) -> Absence:
    """What is noted when a worker does not know a model."""
    resident = worker.models.get(model)
    if resident is None:
        return Absence(worker.num_known, "")
    return Absence(worker.num_known, resident.state, resident.epoch)
