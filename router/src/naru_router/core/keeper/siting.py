"""Where one more copy of a model goes: placement's answer, with what the keeper alone knows. Pure.

Placement knows bytes and places. The keeper knows what is under way, who refused, and which idle copies are not spare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from naru_proto.placement import Defragmentation, Held, HeldState, Want, WorkerSlot, defragment, place, want_of
from naru_router.core.keeper.model import UP_STATES, KeeperLimits, KeeperView

MayLeave = Callable[[str, str], bool]
"""(model, worker id): whether this copy may leave for another model's."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker, or why there is none."""

    worker_id: str
    """Empty: none."""
    why: str
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Starved:
    """A model that was to get a copy and fits nowhere."""

    why: str = ""
    next_s: float = -math.inf
    """When it is worth to look again."""
    num_looks: int = 0

    def again(self, why: str, now_s: float, limits: KeeperLimits) -> Starved:
        """After one more look in vain."""
        pause_s = min(limits.starved_s * 2.0 ** min(self.num_looks, 30), limits.max_starved_s)
        return Starved(why, now_s + pause_s, self.num_looks + 1)


NOT_STARVED = Starved()


class Sites:
    """The workers while the moves of one instant are chosen. Mutable."""

    def __init__(self, view: KeeperView, coming: Iterable[tuple[str, str]], may_leave: MayLeave) -> None:
        """`coming`: (model, worker id) of copies that were ordered and that no lease shows yet."""
        self._view = view
        self._slots = {slot.worker_id: _guarded(slot, may_leave) for slot in view.slots}
        self._taken: set[str] = set()
        for model, worker_id in coming:
            self._put(model, worker_id)

    def one_more(self, model: str, barred: Collection[str]) -> Site:
        """A worker for one more copy. Each worker gets one copy at a time: what leaves for it is not known before."""
        placement = place([self.want(model, 1, {*barred, *self._taken})], self._slots.values())
        new = next((copy for copy in placement.copies[model] if copy.is_new), None)
        if new is None:
            return Site("", placement.unplaced[0].reason if placement.unplaced else "it is everywhere it may be")
        self._put(model, new.worker_id)
        self._taken.add(new.worker_id)
        return Site(new.worker_id, "; ".join(new.reasons), new.victims)

    def room_among_idle(
        self, model: str, barred: Collection[str], others: Iterable[str], max_moves: int
    ) -> Defragmentation:
        """Moves of idle copies of `others` that make room for one more copy."""
        wants = [self.want(model, 1, barred), *(self.want(other, 0, ()) for other in sorted(others) if other != model)]
        return defragment(wants, self._slots.values(), max_moves)

    def want(self, model: str, num_more: int, barred: Collection[str]) -> Want:
        """So many more copies than there are, or are on their way."""
        record = self._view.models[model]
        held = [s.holding[model] for s in self._slots.values() if model in s.holding]
        holders = [
            slot.worker_id
            for slot in self._slots.values()
            if model in slot.holding
            and slot.holding[model].state in UP_STATES
            and not slot.is_leaving
            and self._view.may_hold(slot.worker_id, record)
        ]
        want = want_of(model, record, len(holders) + num_more, self._view.footprints.get(model))
        num_bytes = want.num_bytes or max((each.num_bytes for each in held), default=0)
        return dataclasses.replace(want, num_bytes=num_bytes, barred=frozenset(barred) - frozenset(holders))

    def _put(self, model: str, worker_id: str) -> None:
        slot = self._slots.get(worker_id)
        if slot is None or model not in self._view.models:
            return
        if model in slot.holding and slot.holding[model].state in UP_STATES:
            return
        num_bytes = self.want(model, 0, ()).num_bytes
        held = Held(HeldState.COMING, num_bytes, False, num_accelerators=self._view.models[model].num_accelerators)
        self._slots[worker_id] = dataclasses.replace(slot, holding={**slot.holding, model: held})


def _guarded(slot: WorkerSlot, may_leave: MayLeave) -> WorkerSlot:
    """The worker, with the idle copies that are not spare marked as such: placement leaves those where they are."""
    guarded = {
        model: dataclasses.replace(held, is_wanted=True)
        for model, held in slot.holding.items()
        if held.is_idle and not held.is_wanted and not may_leave(model, slot.worker_id)
    }
    return dataclasses.replace(slot, holding={**slot.holding, **guarded}) if guarded else slot
