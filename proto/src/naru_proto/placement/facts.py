"""From what stands in Redis to what placement asks for: leases, known models, footprints, the registry. Pure.

Used by the keeper, by the router's request path and by the operator alike, so that all of them count bytes in one way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from naru_proto.placement.model import Held, HeldState, Near, Want, WorkerSlot
from naru_proto.registry import FootprintRecord, KnownRecord, ModelRecord, ResidentRecord, WorkerRecord

_STATES = {
    "ready": HeldState.READY,
    "active": HeldState.READY,
    "fetching": HeldState.COMING,
    "loading": HeldState.COMING,
}
_NEAR = {"host": Near.HOST, "disk": Near.DISK}
PINNED = "pinned"


def read_labels(text: str | bytes) -> dict[str, str] | None:
    """A node's labels as they stand in Redis; None: that is no such thing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return None
    return found


def copy_bytes(footprint: FootprintRecord | None) -> int:
    """What a copy takes when it comes up; 0: not known."""
    if footprint is None:
        return 0
    return max(0, footprint.weight_bytes) + max(0, footprint.kv_min_bytes) + max(0, footprint.private_bytes)


def served(models: Mapping[str, ModelRecord]) -> dict[str, ModelRecord]:
    """The name that workers hold each entry under, its target's where it has one, to the entry."""
    entries = (record for _, record in sorted(models.items()) if not record.is_revision)
    return {record.target or record.name: record for record in entries}


def want_of(
    name: str,
    record: ModelRecord,
    num_copies: int,
    footprint: FootprintRecord | None = None,
    barred: Collection[str] = (),
) -> Want:
    """So many copies of an entry's model. ``name``: what workers hold it under."""
    return Want(
        name,
        record.pools,
        num_copies,
        copy_bytes(footprint),
        max(1, record.num_accelerators),
        record.spread_key,
        record.policy == PINNED,
        record.priority,
        frozenset(barred),
    )


def slots_of(
    workers: Mapping[str, WorkerRecord],
    *,
    known: Mapping[str, Mapping[str, KnownRecord]] | None = None,
    models: Mapping[str, ModelRecord] | None = None,
    footprints: Mapping[str, FootprintRecord] | None = None,
    nodes: Mapping[str, Mapping[str, str]] | None = None,
) -> tuple[WorkerSlot, ...]:
    """All workers, by name. ``known``: by worker, what it has near; ``nodes``: labels of a node, by its name.

    Copies in memory or on their way there are held; those in host memory are near; failed ones are named as such.
    """
    entries, footprints, nodes = served(models or {}), footprints or {}, nodes or {}
    kept = _kept(workers, entries)
    return tuple(
        slot_of(
            record,
            known=(known or {}).get(worker_id, {}),
            entries=entries,
            footprints=footprints,
            labels=nodes.get(record.node, {}),
            kept=kept.get(worker_id, frozenset()),
        )
        for worker_id, record in sorted(workers.items())
    )


def slot_of(
    record: WorkerRecord,
    *,
    known: Mapping[str, KnownRecord],
    entries: Mapping[str, ModelRecord],
    footprints: Mapping[str, FootprintRecord],
    labels: Mapping[str, str],
    kept: Collection[str] = (),
) -> WorkerSlot:
    """One worker. ``entries``: of `served`; ``kept``: models of which its copy is one that there must be."""
    near = {name: _NEAR[each.tier] for name, each in known.items() if each.tier in _NEAR}
    near |= {name: Near.HOST for name, resident in record.models.items() if resident.state == "host"}
    holding = {
        name: held_of(resident, entries.get(name), footprints.get(name), is_wanted=name in kept)
        for name, resident in record.models.items()
        if resident.state in _STATES
    }
    return WorkerSlot(
        worker_id=record.worker_id,
        pool=record.pool,
        node=record.node,
        domains={**labels, **record.domains},
        budget_bytes=max(0, record.budget_bytes),
        used_bytes=max(0, record.used_bytes),
        host_budget_bytes=max(0, record.host_budget_bytes),
        num_accelerators=max(1, record.num_accelerators),
        holding=holding,
        near={name: tier for name, tier in near.items() if name not in holding},
        failed=frozenset(name for name, resident in record.models.items() if resident.state == "failed"),
        is_leaving=record.leaving or record.draining,
    )


def held_of(
    resident: ResidentRecord,
    entry: ModelRecord | None,
    footprint: FootprintRecord | None,
    *,
    is_wanted: bool = False,
) -> Held:
    """A copy that a lease shows in memory or on its way there. ``entry``: the one it serves; None: not known."""
    now_bytes = max(0, resident.num_bytes, resident.weight_bytes + resident.kv_bytes)
    private_bytes = max(0, footprint.private_bytes) if footprint is not None else 0
    num_bytes = now_bytes + private_bytes if now_bytes else copy_bytes(footprint)
    return Held(
        state=_STATES[resident.state],
        num_bytes=num_bytes,
        # A load books its bytes when it begins, not while files are fetched or it waits for room.
        is_booked=resident.state != "fetching",
        num_in_flight=max(0, resident.num_in_flight),
        last_used_s=resident.last_used_s or resident.since_s,
        is_pinned=entry is not None and entry.policy == PINNED,
        priority=entry.priority if entry is not None else 100,
        num_accelerators=max(1, entry.num_accelerators) if entry is not None else 1,
        is_wanted=is_wanted,
    )


def _kept(workers: Mapping[str, WorkerRecord], entries: Mapping[str, ModelRecord]) -> dict[str, set[str]]:
    """Worker to the models of which its copy is one of the fewest that there must be."""
    holders: dict[str, list[tuple[tuple[int, int, int], str]]] = {}
    for worker_id, record in workers.items():
        if record.leaving or record.draining:
            continue
        for name, resident in record.models.items():
            entry = entries.get(name)
            if resident.state in _STATES and entry is not None and not entry.on_demand and entry.min_replicas > 0:
                rank = held_of(resident, entry, None).rank
                holders.setdefault(name, []).append((rank, worker_id))
    kept: dict[str, set[str]] = {}
    for name, found in holders.items():
        for _, worker_id in sorted(found)[: entries[name].min_replicas]:
            kept.setdefault(worker_id, set()).add(name)
    return kept
