"""How good a place a worker is for a further copy, and the words for it. Pure.

Order: where no load of it has failed, where it fits, in a failure domain with the fewest copies of it, where something
of it is near, where it fits with the least room left, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from naru_proto.placement.model import HeldState, Near, Want, WorkerSlot
from naru_proto.placement.room import Items, choose_victims, fits, megabytes, room_bytes, victim_cost

FITS, UNSURE, EVICTS = 0, 1, 2
"""How a copy fits: into free bytes; nobody knows, for want of its size or the worker's budget; others leave for it."""
Key = tuple[bool, int, int, int, int, int, int, str]


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker for one copy; the one with the lowest key is the best."""

    key: Key
    slot: WorkerSlot
    fit: int
    room_bytes: int
    num_in_domain: int
    near: Near
    victims: tuple[str, ...] = ()


class Surroundings:
    """What of a model lies where, while its copies are placed. ``holders``: workers that have a copy or get one."""

    def __init__(self, want: Want, slots: Iterable[WorkerSlot], holders: Iterable[WorkerSlot]) -> None:
        self._want = want
        model = want.model
        self._nodes = {
            slot.node
            for slot in slots
            if slot.node and (slot.near.get(model) is Near.DISK or (model in slot.holding and _has_files(slot, model)))
        }
        self._num_in_domain: dict[str, int] = {}
        for holder in holders:
            self.add(holder)

    def add(self, holder: WorkerSlot) -> None:
        """One more worker has a copy."""
        domain = holder.domain(self._want.spread_key)
        self._num_in_domain[domain] = self._num_in_domain.get(domain, 0) + 1

    def num_in_domain(self, slot: WorkerSlot) -> int:
        """Copies in a worker's failure domain."""
        return self._num_in_domain.get(slot.domain(self._want.spread_key), 0)

    def near(self, slot: WorkerSlot) -> Near:
        """How near to a worker the model's weights are; files that another worker of its node has count."""
        near = slot.near.get(self._want.model, Near.FAR)
        held = slot.holding.get(self._want.model)
        if held is not None and held.state is HeldState.RESTING:
            near = min(near, Near.DISK)
        return Near.DISK if near is Near.FAR and slot.node in self._nodes else near


def offer(slot: WorkerSlot, want: Want, around: Surroundings, added: Items, removed: Collection[str]) -> Offer | None:
    """The worker's offer without anybody leaving; None: it has too little room. ``added`` and ``removed``: copies
    that were placed there, and that left for them.
    """
    num_copies = len(slot.holding) + len(added) - len(removed)
    near, num_in_domain, has_failed = around.near(slot), around.num_in_domain(slot), want.model in slot.failed
    room = room_bytes(slot, added, removed, want.num_accelerators) if slot.budget_bytes > 0 else 0
    if want.num_bytes > 0 and slot.budget_bytes > 0:
        left = room - want.share_bytes * want.num_accelerators
        if left < 0 or not fits(slot, want, added, removed):
            return None
        key = (has_failed, FITS, num_in_domain, int(near), left, 0, num_copies, slot.worker_id)
        return Offer(key, slot, FITS, room, num_in_domain, near)
    # Where sizes are not known, several must not all go to the one worker that has most room now.
    num_unsized = slot.num_unsized + sum(held.num_bytes == 0 for held in added.values())
    key = (has_failed, UNSURE, num_in_domain, int(near), num_unsized, -room, num_copies, slot.worker_id)
    return Offer(key, slot, UNSURE, room, num_in_domain, near)


def evicting_offer(
    slot: WorkerSlot, want: Want, around: Surroundings, added: Items, removed: Collection[str], evictable: Iterable[str]
) -> Offer | None:
    """The worker's offer when the first of the `evictable` copies leave; None: all of them are not enough."""
    room = room_bytes(slot, added, removed, want.num_accelerators)
    victims = choose_victims(slot, want, added, removed, evictable)
    if victims is None:
        return None
    cost, last_used_s = victim_cost(slot, victims)
    near, num_in_domain, has_failed = around.near(slot), around.num_in_domain(slot), want.model in slot.failed
    key = (has_failed, EVICTS, num_in_domain, int(near), cost, last_used_s, len(victims), slot.worker_id)
    return Offer(key, slot, EVICTS, room, num_in_domain, near, victims)


def reasons(best: Offer, want: Want, *, num_compared: int) -> tuple[str, ...]:
    """Why a copy goes there, most important first."""
    return tuple(_reasons(best, want, num_compared))


def _reasons(best: Offer, want: Want, num_compared: int) -> Iterable[str]:
    room = megabytes(best.room_bytes)
    if best.fit == FITS:
        yield f"it fits: a copy needs {megabytes(want.num_bytes)}, {room} are free"
    elif best.fit == EVICTS:
        yield f"{', '.join(best.victims)} must leave: a copy needs {megabytes(want.num_bytes)}, {room} are free"
    elif want.num_bytes == 0:
        yield f"its size is not known yet; {room} are free" if best.slot.budget_bytes else "its size is not known yet"
    else:
        yield "the worker's memory budget is not known"
    if best.num_in_domain:
        domain = best.slot.domain(want.spread_key)
        yield f"no failure domain with fewer copies can take it: {domain!r} has {best.num_in_domain}"
    if best.near is not Near.FAR:
        yield "its weights are in host memory there" if best.near is Near.HOST else "its files are on that node's disk"
    if want.model in best.slot.failed:
        yield "its load failed there, and no other worker can take it"
    yield f"best of {num_compared} workers that can take it"


def _has_files(slot: WorkerSlot, model: str) -> bool:
    """Whether a copy says that the files are on its node; one that is being fetched may have none yet."""
    return slot.holding[model].state in (HeldState.READY, HeldState.RESTING)


def why_stays(slot: WorkerSlot, model: str) -> tuple[str, ...]:
    """Why a copy that is there is not moved."""
    return (_STAYS[slot.holding[model].state],)


_STAYS: Mapping[HeldState, str] = {
    HeldState.READY: "it is ready there",
    HeldState.COMING: "it is on its way there",
    HeldState.RESTING: "it belongs there; its worker gave its memory to others",
    HeldState.FAILED: "its load failed there; the worker tries again by itself",
}
