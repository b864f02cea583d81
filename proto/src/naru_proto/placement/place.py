"""`place`: all wanted copies at once. Pure; the same wants and slots in any order give the same placement.

Best-fit decreasing with hard admission: copies that are there stay, new ones go, largest first, where `preference`
says, and what fits nowhere is told with its numbers. Source: D. S. Johnson, Near-Optimal Bin Packing Algorithms (1973),
for best-fit decreasing; failure domains, warm tiers and victims are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from naru_proto.placement.model import Held, HeldState, PlacedCopy, Placement, Unplaced, Want, WorkerSlot
from naru_proto.placement.preference import Offer, Surroundings, evicting_offer, offer, reasons, why_stays
from naru_proto.placement.room import is_eligible, room_bytes, why_nowhere


def place(wants: Iterable[Want], slots: Iterable[WorkerSlot]) -> Placement:
    """Where the copies belong. Copies that nobody wants are left alone, but idle ones may leave for wanted ones.

    Raises:
        ValueError: a model is wanted twice.
    """
    order = sorted(wants, key=lambda want: want.order)
    if len({want.model for want in order}) != len(order):
        raise ValueError("a model is wanted twice; add its copies up")
    board = Board(slots)
    # All that stay first: no new copy may move one that is placed.
    for want in order:
        board.keep(want)
    unplaced = [missing for want in order if (missing := board.add_copies(want)) is not None]
    copies = {want.model: board.copies(want.model) for want in order}
    return Placement(dict(sorted(copies.items())), tuple(sorted(unplaced, key=lambda each: each.model)))


class Board:
    """Workers while copies are placed on them. Mutable; used by one decision."""

    def __init__(self, slots: Iterable[WorkerSlot]) -> None:
        self.slots = {slot.worker_id: slot for slot in sorted(slots, key=lambda each: each.worker_id)}
        self._added: dict[str, dict[str, Held]] = {}
        self._removed: dict[str, set[str]] = {}
        self._placed: dict[str, dict[str, PlacedCopy]] = {}
        """Model to its copies by worker."""
        self._holders: dict[str, list[WorkerSlot]] = {}
        for slot in self.slots.values():
            for model in slot.holding:
                self._holders.setdefault(model, []).append(slot)

    def added(self, worker_id: str) -> Mapping[str, Held]:
        """Copies that were placed on a worker."""
        return self._added.get(worker_id, {})

    def removed(self, worker_id: str) -> set[str]:
        """Copies that leave a worker."""
        return self._removed.get(worker_id, set())

    def holders(self, model: str) -> list[WorkerSlot]:
        """Workers that have a copy, in whatever state."""
        return self._holders.get(model, [])

    def copies(self, model: str) -> tuple[PlacedCopy, ...]:
        """A model's copies as placed so far, by worker."""
        return tuple(copy for _, copy in sorted(self._placed.get(model, {}).items()))

    def keep(self, want: Want) -> None:
        """The best of the copies that are there stay, as many as are wanted."""
        there = [slot for slot in self.holders(want.model) if is_eligible(slot, want)]
        there.sort(key=lambda slot: (slot.holding[want.model].rank, slot.worker_id))
        self._placed[want.model] = {
            slot.worker_id: PlacedCopy(slot.worker_id, False, (), why_stays(slot, want.model))
            for slot in there[: max(0, want.num_copies)]
        }

    def add_copies(self, want: Want) -> Unplaced | None:
        """Places what is missing; what fits nowhere is returned."""
        placed = self._placed[want.model]
        num_missing = want.num_copies - len(placed)
        if num_missing <= 0:
            return None
        around = Surroundings(want, self.slots.values(), (self.slots[worker_id] for worker_id in placed))
        free = [s for s in self.slots.values() if is_eligible(s, want) and s.worker_id not in placed]
        for already in range(num_missing):
            offers = self.offers(want, free, around)
            if not offers:
                return Unplaced(want.model, num_missing - already, self._why_nowhere(want, free))
            best = min(offers, key=lambda each: each.key)
            self._take(want, best, reasons(best, want, num_compared=len(offers)))
            around.add(best.slot)
            free.remove(best.slot)
        return None

    def offers(self, want: Want, slots: Iterable[WorkerSlot], around: Surroundings) -> list[Offer]:
        """Of all that can take a copy; with copies that leave only where it fits nowhere without."""
        slots = list(slots)
        found = [offer(slot, want, around, self.added(slot.worker_id), self.removed(slot.worker_id)) for slot in slots]
        if not any(found):
            found = [
                evicting_offer(
                    slot, want, around, self.added(slot.worker_id), self.removed(slot.worker_id), self.evictable(slot)
                )
                for slot in slots
            ]
        return [each for each in found if each is not None]

    def put(self, want: Want, slot: WorkerSlot) -> None:
        """A copy goes there."""
        held = Held(HeldState.COMING, want.num_bytes, False, num_accelerators=want.num_accelerators)
        self._added.setdefault(slot.worker_id, {})[want.model] = held

    def remove(self, slot: WorkerSlot, models: Iterable[str]) -> None:
        """Copies leave a worker."""
        self._removed.setdefault(slot.worker_id, set()).update(models)

    def _take(self, want: Want, best: Offer, why: tuple[str, ...]) -> None:
        worker_id = best.slot.worker_id
        self.remove(best.slot, best.victims)
        self.put(want, best.slot)
        self._placed[want.model][worker_id] = PlacedCopy(worker_id, True, best.victims, why)

    def evictable(self, slot: WorkerSlot) -> list[str]:
        """Idle copies there that nobody must have, the cheapest first."""
        removed = self.removed(slot.worker_id)
        return [model for model in slot.idle_order if model not in removed and self._is_spare(slot, model)]

    def _is_spare(self, slot: WorkerSlot, model: str) -> bool:
        placed = self._placed.get(model)
        return not slot.holding[model].is_wanted if placed is None else slot.worker_id not in placed

    def _why_nowhere(self, want: Want, free: Iterable[WorkerSlot]) -> str:
        rooms: dict[str, tuple[int, int]] = {}
        for slot in free:
            added, removed = self.added(slot.worker_id), self.removed(slot.worker_id)
            idle = {*removed, *self.evictable(slot)}
            rooms[slot.worker_id] = (
                room_bytes(slot, added, removed, want.num_accelerators),
                room_bytes(slot, added, idle, want.num_accelerators),
            )
        return why_nowhere(want, self.slots.values(), rooms)
