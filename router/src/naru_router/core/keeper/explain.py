"""Where models are and would go, as JSON for `naru explain placement`. Pure; asked by the pages of any router."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.placement import Choice, Held, PlacedCopy, WorkerSlot, choose_load, copy_bytes, place, want_of
from naru_proto.registry import ModelRecord
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import CopyLoad, KeeperView

_ON_DEMAND = "OnDemand"
_POLICIES = {"Pinned": "pinned", "Preferred": "preferred", _ON_DEMAND: "on_demand"}
_NOTHING = CopyLoad()

MaySee = Callable[[str], bool]
"""Whether the one who asks may know of a model, by the name that workers hold it under."""


def model_page(view: KeeperView, keeper: Keeper, name: str, now_s: float, may_see: MaySee) -> dict[str, Any]:
    """One model: its copies, how many there should be and why, and where the next one would come up."""
    record = view.models[name]
    copies = sorted(view.copies.get(name, {}).items())
    ceiling = keeper.watch.ceiling(record)
    return {
        "model": record.name,
        "held_as": name,
        "policy": record.policy,
        "min_replicas": record.min_replicas,
        "max_replicas": None if math.isinf(ceiling) else int(ceiling),
        "copy_bytes": _copy_bytes(view, name) or None,
        "copies": [_copy(view, name, worker_id, held) for worker_id, held in copies],
        "reasons": keeper.explain(view, name, now_s),
        "next": _next_copy(view, name, record, may_see),
    }


def worker_page(slot: WorkerSlot, may_see: MaySee) -> dict[str, Any]:
    """One worker and what it has room for."""
    return {
        "worker": slot.worker_id,
        "pool": slot.pool,
        "node": slot.node or None,
        "is_leaving": slot.is_leaving,
        "budget_bytes": slot.budget_bytes or None,
        "used_bytes": slot.used_bytes,
        "free_bytes": max(0, slot.free_bytes),
        "idle_bytes": slot.idle_bytes,
        "models": sorted(filter(may_see, slot.holding)),
    }


def record_of(manifest: ModelDeployment, pools: tuple[str, ...]) -> ModelRecord:
    """What the registry would say of a manifest, as far as placement asks. ``pools``: that may hold it; empty: any."""
    spec = manifest.spec
    return ModelRecord(
        name=manifest.metadata.name,
        uri=spec.model.uri,
        generation=0,
        revision=spec.model.revision or "",
        min_replicas=spec.replicas.min,
        max_replicas=spec.replicas.max or 0,
        on_demand=spec.residency.policy == _ON_DEMAND,
        policy=_POLICIES[spec.residency.policy],
        priority=spec.residency.priority,
        pools=pools,
        num_accelerators=spec.resources.tensor_parallel,
        spread_key=spec.placement.spread_topology_key,
    )


def dry_run(view: KeeperView, record: ModelRecord, num_bytes: int, may_see: MaySee) -> dict[str, Any]:
    """Where a model that is not served yet would go, what would leave for it, or why it fits nowhere.

    ``num_bytes``: of a copy; 0: as measured of the same model, where it was ever loaded.
    """
    notes = []
    found, like = (num_bytes, "") if num_bytes else _size_of(view, record)
    if like and may_see(like):
        notes.append(f"a copy is taken to be as large as one of {like!r}, which has the same files")
    if not found:
        notes.append("the size of a copy is not known before its first load: say it, or workers are taken to have room")
    serving = next((name for name, each in view.models.items() if each.name == record.name), None)
    if serving is not None:
        notes.append("a model of this name is served already; what it holds now stays in this count")
    # A name that no worker can hold: copies that are there are those of the model as it is now.
    name = f"{record.name}@dry-run"
    num_copies = 1 if record.on_demand else record.min_replicas
    want = dataclasses.replace(want_of(name, record, num_copies), num_bytes=found)
    page: dict[str, Any] = {"model": record.name, "num_copies": num_copies, "copy_bytes": found or None}
    if record.on_demand:
        notes.append("it is on demand: this is where its first request would bring it up")
        choice = choose_load(want, view.slots)
        copies = [_choice(choice, may_see)] if choice.worker_id else []
        unplaced = None if choice.worker_id else {"num_missing": 1, "reason": "; ".join(choice.reasons)}
    else:
        placement = place([want], view.slots)
        copies = [_placed(copy, may_see) for copy in placement.copies[name]]
        missing = placement.unplaced[0] if placement.unplaced else None
        unplaced = {"num_missing": missing.num_missing, "reason": missing.reason} if missing is not None else None
    return {**page, "copies": copies, "unplaced": unplaced, "notes": notes}


def _copy(view: KeeperView, name: str, worker_id: str, held: Held) -> dict[str, Any]:
    slot = view.by_worker[worker_id]
    return {
        "worker": worker_id,
        "pool": slot.pool,
        "node": slot.node or None,
        "state": held.state.name.lower(),
        "is_leaving": slot.is_leaving,
        "num_bytes": held.num_bytes,
        "num_in_flight": view.num_in_flight(worker_id, name),
        "queue_s": round(view.loads.get((worker_id, name), _NOTHING).queue_s, 3),
        "is_pinned": held.is_pinned,
    }


def _next_copy(view: KeeperView, name: str, record: ModelRecord, may_see: MaySee) -> dict[str, Any]:
    """Where one more copy would come up if it were wanted now."""
    there = frozenset(view.copies.get(name, {}))
    want = want_of(name, record, 1, view.footprints.get(name), there)
    want = dataclasses.replace(want, num_bytes=want.num_bytes or _copy_bytes(view, name))
    choice = choose_load(want, view.slots)
    if not choice.worker_id:
        return {"worker": None, "victims": [], "reasons": list(choice.reasons)}
    return _choice(choice, may_see)


def _choice(choice: Choice, may_see: MaySee) -> dict[str, Any]:
    return _placed(PlacedCopy(choice.worker_id, True, choice.victims, choice.reasons), may_see)


def _placed(copy: PlacedCopy, may_see: MaySee) -> dict[str, Any]:
    """A place, without the names of models that the one who asks may not know of."""
    if all(map(may_see, copy.victims)):
        return {"worker": copy.worker_id, "victims": list(copy.victims), "reasons": list(copy.reasons)}
    reasons = [reason for reason in copy.reasons if not any(victim in reason for victim in copy.victims)]
    return {
        "worker": copy.worker_id,
        "victims": sorted(filter(may_see, copy.victims)),
        "reasons": ["idle copies of other models must leave", *reasons],
    }


def _copy_bytes(view: KeeperView, name: str) -> int:
    held = (each.num_bytes for each in view.copies.get(name, {}).values())
    return copy_bytes(view.footprints.get(name)) or max(held, default=0)


def _size_of(view: KeeperView, record: ModelRecord) -> tuple[int, str]:
    """Bytes of a copy and the model they were measured of: the same one, or another with the same files."""
    same = [
        (each.name != record.name, name)
        for name, each in view.models.items()
        if each.uri == record.uri and each.revision == record.revision and _copy_bytes(view, name)
    ]
    return (_copy_bytes(view, min(same)[1]), min(same)[1]) if same else (0, "")
