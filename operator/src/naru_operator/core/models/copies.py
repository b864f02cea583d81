"""Where the copies of all wanted revisions belong, which are brought up ahead, and which stay for now. Pure.

A copy that serves goes only when others serve in its place: that holds for workers that leave, for pools that no longer
fit, and for revisions that routers may not have heard the end of. Called by the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naru_operator.core import placement as core_placement
from naru_operator.core.model_plan import AT_REST, KNOWN
from naru_operator.core.models.fleet import Copy, Fleet
from naru_operator.core.models.intent import Intent, Wanted, World
from naru_operator.core.placement import PlacementFacts
from naru_proto import names
from naru_proto.placement import Want, WorkerSlot, choose_load, place

RETIRE_S = 5
"""After requests have been sent to another revision, the old one stays loaded for so long: routers hear of it late."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Of all wanted revisions, and of those that still stand."""

    placement: Mapping[str, tuple[str, ...]]
    """Registry name to its workers; frozen revisions are not in it."""
    known: Mapping[str, tuple[str, ...]]
    """Registry name to the workers that are told of it beside its placement: more copies may come up there."""
    unplaced: Mapping[str, str]
    """Registry name to why copies of it fit nowhere."""
    raised: frozenset[tuple[str, str]]
    """(worker, name) to bring up now, though requests alone would not."""
    kept: frozenset[tuple[str, str]]
    """(worker, name) that are not placed and stay for now."""
    retired_s: dict[str, int]
    """Registry name of a revision that nobody wants and workers still hold: since when, Unix seconds."""


def settle_copies(intents: list[Intent], world: World) -> Copies:
    """Decides for all at once: revisions compete for the same workers."""
    facts, records = world.snapshot.placement, world.snapshot.records
    sizes = _sizes(intents, world.fleet, facts)
    slots = world.fleet.slots(facts, sizes, records)
    wanted_all = [wanted for intent in intents for wanted in intent.wanted if not wanted.is_frozen]
    placement, unplaced = _placement(wanted_all, world.fleet, sizes, slots)
    known = {
        each.name: _knowing(each, placement[each.name], unplaced, slots, world.fleet, sizes) for each in wanted_all
    }
    by_worker = {each.worker_id: each for each in slots}
    raised: set[tuple[str, str]] = set()
    kept: set[tuple[str, str]] = set()
    for intent in intents:
        for wanted in intent.wanted:
            copies = world.fleet.copies(wanted.name)
            if wanted.is_frozen:
                kept |= {(copy.worker_id, wanted.name) for copy in copies}
                continue
            placed = placement[wanted.name]
            raised |= {(worker_id, wanted.name) for worker_id in _to_raise(wanted, copies, placed, by_worker)}
            kept |= {(worker_id, wanted.name) for worker_id in _to_keep(wanted, copies, placed, by_worker)}
    retired_s = _retired(intents, world)
    for name, since_s in retired_s.items():
        if world.now_s - since_s < RETIRE_S:
            kept |= {(copy.worker_id, name) for copy in world.fleet.copies(name)}
    return Copies(placement, known, unplaced, frozenset(raised), frozenset(kept), retired_s)


def _sizes(intents: Iterable[Intent], fleet: Fleet, facts: PlacementFacts) -> dict[str, int]:
    """What a copy of each wanted revision takes; 0: not known."""
    sizes: dict[str, int] = {}
    for intent in intents:
        known = {
            each.name: core_placement.size_of(each.name, facts) or fleet.num_bytes(each.name) for each in intent.wanted
        }
        # A revision that nobody has loaded yet is most likely as large as the one it follows.
        sizes |= {name: size or max(known.values()) for name, size in known.items()}
    return sizes


def _placement(
    wanted_all: Iterable[Wanted], fleet: Fleet, sizes: Mapping[str, int], slots: list[WorkerSlot]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Name to its workers, and name to why copies of it fit nowhere. One on demand is known on all of its pools."""
    wants = {each.name: _want(each, fleet, sizes) for each in wanted_all if each.num_copies is not None}
    placed = place(wants.values(), slots)
    unplaced = {each.model: each.reason for each in placed.unplaced}
    result: dict[str, tuple[str, ...]] = {}
    for each in wanted_all:
        if each.num_copies is None:
            result[each.name] = _workers_of(each.pools, slots)
            continue
        workers = placed.workers(each.name)
        if not workers and each.name in unplaced and _must_be_there(each):
            choice = choose_load(wants[each.name], slots)
            workers = (choice.worker_id,) if choice.worker_id else ()
        result[each.name] = workers
    return result, unplaced


def _want(wanted: Wanted, fleet: Fleet, sizes: Mapping[str, int]) -> Want:
    assert wanted.model is not None and wanted.num_copies is not None, "only revisions with a number of copies"
    num_copies = wanted.num_copies
    if wanted.is_stopped:
        num_staying = sum(copy.is_staying and copy.state != KNOWN for copy in fleet.copies(wanted.name))
        num_copies = min(num_copies, max(1, num_staying))
    return core_placement.want(wanted.model, wanted.pools, num_copies, sizes[wanted.name])


def _must_be_there(wanted: Wanted) -> bool:
    """Whether its worker is to make room by its own rules: a rollout waits for it, or it is pinned."""
    return wanted.num_ahead > 0 or (wanted.model is not None and wanted.model.residency.pinned)


def _knowing(
    wanted: Wanted,
    placed: tuple[str, ...],
    unplaced: Mapping[str, str],
    slots: list[WorkerSlot],
    fleet: Fleet,
    sizes: Mapping[str, int],
) -> tuple[str, ...]:
    """Workers that are told of it beside its placement: for further copies, or for requests if it fits nowhere now."""
    if wanted.num_copies is None:
        return ()
    told = {copy.worker_id for copy in fleet.copies(wanted.name) if copy.is_staying}
    others = [worker_id for worker_id in _workers_of(wanted.pools, slots) if worker_id not in placed]
    if core_placement.may_grow(wanted.num_copies, wanted.max_copies):
        return tuple(worker_id for worker_id in others if worker_id in told or not wanted.is_stopped)
    if wanted.name not in unplaced or placed:
        return ()
    if told.intersection(others):
        return tuple(worker_id for worker_id in others if worker_id in told)
    choice = choose_load(_want(wanted, fleet, sizes), slots)
    # Where it can never fit, whoever is asked says so in numbers.
    return (choice.worker_id,) if choice.worker_id in others else tuple(others)


def _workers_of(pools: tuple[str, ...], slots: Iterable[WorkerSlot]) -> tuple[str, ...]:
    return tuple(slot.worker_id for slot in slots if slot.pool in pools)


def _to_raise(
    wanted: Wanted, copies: list[Copy], placed: tuple[str, ...], by_worker: Mapping[str, WorkerSlot]
) -> list[str]:
    """Workers that bring a copy up in place of one that is to go, or for a rollout to go on."""
    states = {copy.worker_id: copy.state for copy in copies}
    num_needed = wanted.num_ahead
    if any(copy.is_ready and copy.worker_id not in placed for copy in copies):
        num_needed = max(num_needed, min(wanted.num_copies or 1, sum(copy.is_ready for copy in copies)))
    ups = {copy.worker_id for copy in copies if copy.is_up}
    num_coming = sum(
        worker_id in ups or (wanted.num_copies is not None and states.get(worker_id, KNOWN) == KNOWN)
        for worker_id in placed
    )
    if num_needed <= num_coming or wanted.is_stopped:
        return []
    at_rest = [worker_id for worker_id in placed if states.get(worker_id, KNOWN) in (*AT_REST, "host")]
    at_rest.sort(
        key=lambda worker_id: (
            states.get(worker_id) != "host",
            -by_worker[worker_id].free_bytes,
            worker_id,
        )
    )
    return at_rest[: num_needed - num_coming]


def _to_keep(
    wanted: Wanted, copies: list[Copy], placed: tuple[str, ...], by_worker: Mapping[str, WorkerSlot]
) -> list[str]:
    """Workers whose copy serves until enough copies serve where they belong; busy ones first."""
    num_wanted = wanted.num_copies or 1
    num_needed = min(num_wanted, len(placed)) if placed else num_wanted
    num_missing = num_needed - sum(copy.is_ready and copy.worker_id in placed for copy in copies)
    serving = [copy for copy in copies if copy.is_ready and copy.is_staying and copy.worker_id not in placed]
    serving.sort(key=lambda copy: (by_worker[copy.worker_id].holding[wanted.name].rank, copy.worker_id))
    return [copy.worker_id for copy in serving[: max(0, num_missing)]]


def _retired(intents: Iterable[Intent], world: World) -> dict[str, int]:
    """Revisions of living objects that nobody wants and workers still hold."""
    records, started_s, now_s = world.snapshot.records, world.snapshot.started_s, world.now_s
    retired: dict[str, int] = {}
    for intent in intents:
        model = intent.claim.key.name
        wanted = {each.name for each in intent.wanted}
        target = names.revision_name(model, intent.target)
        for name in world.revisions.get(model, ()):
            is_held = any(copy.is_staying for copy in world.fleet.copies(name))
            if name in wanted or name == target or not is_held:
                continue
            entry = records.get(model)
            is_leaving_now = entry is not None and entry.target == name
            retired[name] = now_s if is_leaving_now else min(now_s, started_s.get(name, now_s))
    return retired
