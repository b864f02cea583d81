"""`drift`: how far what is there is from what is wanted. Pure.

The keeper repairs it; `naru explain placement` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from naru_proto.placement.model import HeldState, Want, WorkerSlot
from naru_proto.placement.room import is_eligible


@dataclass(frozen=True, slots=True)
class DriftLine:
    """One model whose copies are not as wanted."""

    model: str
    num_wanted: int
    num_ready: int
    """On workers that stay and may hold it."""
    num_coming: int
    num_missing: int
    surplus: tuple[str, ...] = ()
    """Workers whose copy is one too many, the first to go first."""
    misplaced: tuple[str, ...] = ()
    """Workers that have a copy and leave, or may not hold it."""
    reasons: tuple[str, ...] = ()


def drift(wants: Iterable[Want], slots: Iterable[WorkerSlot]) -> tuple[DriftLine, ...]:
    """Of all models that are not as wanted, by name."""
    found = sorted(slots, key=lambda slot: slot.worker_id)
    lines = (_line(want, found) for want in sorted(wants, key=lambda each: each.model))
    return tuple(line for line in lines if line.reasons)


def _line(want: Want, slots: Iterable[WorkerSlot]) -> DriftLine:
    up = [s for s in slots if want.model in s.holding and s.holding[want.model].state <= HeldState.COMING]
    there = [slot for slot in up if is_eligible(slot, want)]
    there.sort(key=lambda slot: (slot.holding[want.model].rank, slot.worker_id))
    surplus = tuple(slot.worker_id for slot in reversed(there[max(0, want.num_copies) :]))
    misplaced = tuple(slot.worker_id for slot in up if not is_eligible(slot, want))
    num_ready = sum(slot.holding[want.model].state is HeldState.READY for slot in there)
    num_missing = max(0, want.num_copies - len(there))
    reasons = []
    if num_missing:
        reasons.append(f"{num_missing} of {want.num_copies} copies are missing")
    if surplus:
        reasons.append(f"{len(surplus)} more than {want.num_copies} are there: {', '.join(surplus)}")
    if misplaced:
        reasons.append(f"workers that leave or may not hold it have one: {', '.join(misplaced)}")
    return DriftLine(
        want.model, want.num_copies, num_ready, len(there) - num_ready, num_missing, surplus, misplaced, tuple(reasons)
    )
