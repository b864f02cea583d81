"""`choose_load`: where one cold model comes up for the requests that wait for it. Pure.

On a request's path: it looks at every worker once. What cannot fit now is sent where it will soonest: a request waits,
and the worker makes room by its own rules.
"""

from __future__ import annotations

from collections.abc import Iterable

from naru_proto.placement.model import Choice, Held, HeldState, Near, Want, WorkerSlot
from naru_proto.placement.preference import FITS, Offer, Surroundings, evicting_offer, offer, reasons
from naru_proto.placement.room import fits, is_eligible, megabytes, room_bytes, why_nowhere

_NOTHING: dict[str, Held] = {}


def choose_load(want: Want, slots: Iterable[WorkerSlot]) -> Choice:
    """The worker to bring the model up on: where it is ready or coming already, else the best place for a copy.

    Where its weights are in host memory, if idle copies that nobody must have can make room; then into free bytes,
    where most is free; then in place of idle copies that nobody must have, then of any idle copies; at last where the
    fewest requests stand in the way.
    """
    # Sorted by name: the answer must not depend on the order.
    found = sorted(slots, key=lambda slot: slot.worker_id)
    eligible = [slot for slot in found if is_eligible(slot, want)]
    there = _there(want, eligible)
    if there is not None:
        return there
    around = Surroundings(want, found, ())
    offers = _offers(want, eligible, around)
    if offers:
        best = min(offers, key=lambda each: _key(each, want))
        return Choice(best.slot.worker_id, best.victims, reasons(best, want, num_compared=len(offers)))
    return _soonest(want, eligible, found)


def _offers(want: Want, eligible: Iterable[WorkerSlot], around: Surroundings) -> list[Offer]:
    """Of all workers whose free bytes do, and of those with the weights in host memory that can make room; else of all
    that can make room.
    """
    offers: list[Offer] = []
    able: list[WorkerSlot] = []
    for slot in eligible:
        fitting = offer(slot, want, around, _NOTHING, ())
        if fitting is not None:
            offers.append(fitting)
        elif slot.free_bytes + slot.idle_bytes >= want.num_bytes:
            able.append(slot)
    in_host = [slot for slot in able if around.near(slot) is Near.HOST] if offers else able
    offers += _evicting(want, in_host, around, are_wanted_spared=True)
    return offers or _evicting(want, able, around, are_wanted_spared=False)


def _key(each: Offer, want: Want) -> tuple[bool, bool, int, int, int, int, int, str]:
    """The lowest is the best.

    Weights in host memory first: they come up many times as fast. Then where most is free: models that requests bring
    up come and go, and packed tightly they would evict one another while other workers stand empty. Only one that takes
    most of a worker goes where it fits best.
    """
    has_failed, fit, _, near, measure, second, third, worker_id = each.key
    is_large = 2 * want.share_bytes * each.slot.num_accelerators > each.slot.budget_bytes
    if fit == FITS and not is_large:
        measure = -each.room_bytes
    return has_failed, each.near is not Near.HOST, fit, near, measure, second, third, worker_id


def _there(want: Want, slots: Iterable[WorkerSlot]) -> Choice | None:
    held = [(slot.holding[want.model], slot.worker_id) for slot in slots if want.model in slot.holding]
    up = [each for each in held if each[0].state <= HeldState.COMING]
    if not up:
        return None
    state, worker_id = min((each.state, worker_id) for each, worker_id in up)
    return Choice(worker_id, (), ("it is ready there" if state is HeldState.READY else "it is on its way there",))


def _evicting(want: Want, slots: Iterable[WorkerSlot], around: Surroundings, *, are_wanted_spared: bool) -> list[Offer]:
    found = []
    for slot in slots:
        evictable: Iterable[str] = slot.idle_order
        if are_wanted_spared:
            evictable = (name for name in slot.idle_order if not slot.holding[name].is_wanted)
        found.append(evicting_offer(slot, want, around, _NOTHING, (), evictable))
    return [each for each in found if each is not None]


def _soonest(want: Want, slots: Iterable[WorkerSlot], all_slots: Iterable[WorkerSlot]) -> Choice:
    """Where it fits once what runs has ended, pinned copies aside; the fewest requests in the way first."""
    rooms: dict[str, tuple[int, int]] = {}
    found: list[tuple[bool, int, int, str]] = []
    for slot in slots:
        if slot.num_accelerators == 1:
            free, most = slot.free_bytes, slot.free_bytes + slot.movable_bytes
            can_fit = most >= want.num_bytes
        else:
            free = room_bytes(slot, _NOTHING, (), want.num_accelerators)
            most = room_bytes(slot, _NOTHING, slot.movable, want.num_accelerators)
            can_fit = fits(slot, want, _NOTHING, slot.movable)
        rooms[slot.worker_id] = (free, most)
        if can_fit:
            found.append((want.model in slot.failed, slot.num_in_the_way, -most, slot.worker_id))
    if not found:
        return Choice("", (), (why_nowhere(want, all_slots, rooms),))
    _, num_in_flight, _, worker_id = min(found)
    free, most = rooms[worker_id]
    return Choice(
        worker_id,
        (),
        (
            f"it fits nowhere now: a copy needs {megabytes(want.num_bytes)}, {megabytes(free)} are free there; "
            f"the fewest requests, {num_in_flight}, run where {megabytes(most)} can become free",
        ),
    )
