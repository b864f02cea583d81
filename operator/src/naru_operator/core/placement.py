"""Which workers should hold and know which models: what plans see, in the words of `naru_proto.placement`. Pure.

Shared by the plan of one machine and by that of a cluster. The routers' keeper asks the same algorithm, so that both
come to the same places; how a copy gets there, and when one that is too many may go, is the plans' part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from naru_operator.core.desired import DesiredModel
from naru_operator.core.model_plan import ABSENT, EVICTED, UP, ObservedModel
from naru_proto.placement import Held, HeldState, Want, WorkerSlot, copy_bytes
from naru_proto.placement.facts import held_of, slot_of
from naru_proto.registry import FootprintRecord, KnownRecord, ModelRecord, WorkerRecord

_READY = ("ready", "active")


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    """What stands in Redis and the cluster beside leases and registry. Nothing of it must be there."""

    footprints: Mapping[str, FootprintRecord] = field(default_factory=dict)
    """By registry name."""
    near: Mapping[str, Mapping[str, KnownRecord]] = field(default_factory=dict)
    """Worker to what it has near without holding it."""
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Node to its labels, those that copies are spread over."""


NO_FACTS = PlacementFacts()


def worker_slot(
    record: WorkerRecord,
    models: Mapping[str, ObservedModel],
    facts: PlacementFacts,
    sizes: Mapping[str, int],
    entries: Mapping[str, ModelRecord],
) -> WorkerSlot:
    """One worker as placement sees it.

    ``models``: its lease's, with what commands under way will make of them. ``sizes``: what copies take whose load only
    begins. ``entries``: registry name to its record, of what is pinned and how hard others hold their place.
    """
    slot = slot_of(
        record,
        known=facts.near.get(record.worker_id, {}),
        entries=entries,
        footprints=facts.footprints,
        labels=facts.nodes.get(record.node, {}),
    )
    holding = {
        name: held
        for name, observed in models.items()
        if (held := _held(name, observed, record, facts, sizes, entries)) is not None
    }
    return replace(slot, holding=holding, failed=slot.failed - holding.keys())


def _held(
    name: str,
    observed: ObservedModel,
    record: WorkerRecord,
    facts: PlacementFacts,
    sizes: Mapping[str, int],
    entries: Mapping[str, ModelRecord],
) -> Held | None:
    """A copy; None: what is known alone, or goes, is none."""
    resident = record.models.get(name)
    entry = entries.get(name)
    if resident is not None and resident.state in UP:
        held = held_of(resident, entry, facts.footprints.get(name))
        held = replace(held, num_bytes=held.num_bytes or sizes.get(name, 0))
    else:
        held = Held(HeldState.COMING, sizes.get(name, 0), is_booked=False)
    if observed.state in ABSENT:
        return None
    if observed.state == "failed":
        return replace(held, state=HeldState.FAILED)
    if resident is not None and resident.state in _READY:
        return held
    if observed.state in UP:
        return replace(held, state=HeldState.COMING)
    return replace(held, state=HeldState.RESTING) if observed.state in (EVICTED, "host") else None


def want(
    model: DesiredModel, pools: tuple[str, ...], num_copies: int, num_bytes: int, barred: Iterable[str] = ()
) -> Want:
    """So many copies of a model as workers are told of it. ``num_bytes``: what each takes; 0: not known."""
    return Want(
        model.name,
        pools,
        num_copies,
        num_bytes,
        model.scaling.num_accelerators,
        model.scaling.spread_key,
        model.residency.pinned,
        model.residency.priority,
        frozenset(barred),
    )


def may_grow(num_copies: int, max_copies: int) -> bool:
    """Whether there may be more copies than the plan places: then every worker of its pools is told of the model.

    The routers' keeper brings further ones up. ``max_copies`` 0: as many as there are workers.
    """
    return max_copies == 0 or max_copies > num_copies


def size_of(name: str, facts: PlacementFacts) -> int:
    """What a copy takes, as measured at its last load on any worker; 0: not known."""
    return copy_bytes(facts.footprints.get(name))
