"""What fits on a worker: room on its accelerators, idle copies that could leave, and words for both. Pure.

Used by all decisions of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from naru_proto.placement.model import Held, Want, WorkerSlot

Items = Mapping[str, Held]
"""Model to its copy on one worker."""


def is_eligible(slot: WorkerSlot, want: Want) -> bool:
    """Whether a worker may hold a model at all, room aside."""
    return (
        not slot.is_leaving
        and (not want.pools or slot.pool in want.pools)
        and slot.num_accelerators >= want.num_accelerators
        and slot.worker_id not in want.barred
    )


def room_bytes(slot: WorkerSlot, added: Items, removed: Collection[str], num_accelerators: int) -> int:
    """Bytes that a copy over so many accelerators finds free, with copies `added` and `removed`; may be below 0.

    On several accelerators it is what the fullest of those it would take has left, times their number.
    """
    if slot.num_accelerators > 1:
        return _left_on_the_first(slot, added, removed) * num_accelerators
    if not added and not removed:
        return slot.free_bytes
    coming = sum(held.num_bytes for held in added.values())
    gone = sum(slot.holding[name].booked_bytes for name in removed)
    return slot.free_bytes - coming + gone


def _left_on_the_first(slot: WorkerSlot, added: Items, removed: Collection[str]) -> int:
    """Bytes that a worker's first accelerator has left: every copy lies on it, so none has less."""
    items = [
        (held, held.booked_bytes + held.coming_bytes) for name, held in slot.holding.items() if name not in removed
    ]
    items += [(held, held.num_bytes) for held in added.values()]
    booked = sum(held.booked_bytes for held in slot.holding.values())
    # What belongs to no model lies on all of them alike.
    rest = -(-max(0, slot.used_bytes - booked) // slot.num_accelerators)
    shares = sum(-(-size // max(1, held.num_accelerators)) for held, size in items)
    return slot.budget_bytes // slot.num_accelerators - rest - shares


def choose_victims(
    slot: WorkerSlot, want: Want, added: Items, removed: Collection[str], evictable: Iterable[str]
) -> tuple[str, ...] | None:
    """The first of the `evictable` copies whose leaving makes a copy fit, and no more of them than needed.

    ``evictable``: the cheapest first. None: all of them are not enough.
    """
    is_enough = _enough(slot, want, added, removed)
    chosen: list[str] = []
    order = iter(evictable)
    while not is_enough(chosen):
        name = next(order, None)
        if name is None:
            return None
        chosen.append(name)
    for name in reversed(tuple(chosen)):
        rest = [other for other in chosen if other != name]
        if is_enough(rest):
            chosen = rest
    return tuple(sorted(chosen))


def _enough(slot: WorkerSlot, want: Want, added: Items, removed: Collection[str]) -> Callable[[list[str]], bool]:
    """Whether a copy fits when these leave. On one accelerator sums decide, which are quick."""
    if slot.num_accelerators > 1:
        return lambda leaving: fits(slot, want, added, {*removed, *leaving})
    missing = want.num_bytes - room_bytes(slot, added, removed, 1)
    holding = slot.holding
    return lambda leaving: sum([holding[name].num_bytes for name in leaving]) >= missing


def victim_cost(slot: WorkerSlot, victims: Iterable[str]) -> tuple[int, int]:
    """What a set of victims is worth: weighted bytes, then the last use of the one used last."""
    held = [slot.holding[name] for name in victims]
    return sum(each.num_bytes * each.priority for each in held), max((each.last_used_s for each in held), default=0)


def fits(slot: WorkerSlot, want: Want, added: Items, removed: Collection[str]) -> bool:
    """Whether a further copy fits, on each of the accelerators it would take."""
    needed = want.share_bytes * want.num_accelerators
    return room_bytes(slot, added, removed, want.num_accelerators) >= needed


def why_nowhere(want: Want, slots: Iterable[WorkerSlot], rooms: Mapping[str, tuple[int, int]]) -> str:
    """Why no worker takes a further copy, in numbers.

    ``rooms``: worker to the bytes free for it, and to those with idle copies gone.
    """
    found = sorted(slots, key=lambda slot: slot.worker_id)
    pools = f"pools {', '.join(want.pools)}" if want.pools else "any pool"
    of_pools = [slot for slot in found if not want.pools or slot.pool in want.pools]
    if not of_pools:
        return f"{pools}: there is no worker"
    widest = max(of_pools, key=lambda slot: slot.num_accelerators)
    if widest.num_accelerators < want.num_accelerators:
        return (
            f"a copy needs {want.num_accelerators} accelerators; the most that a worker has is "
            f"{widest.num_accelerators}, on {widest.worker_id!r}"
        )
    if not rooms:
        return f"{pools}: {', '.join(_facts(of_pools, want))}"
    worker_id = max(sorted(rooms), key=lambda each: rooms[each])
    free, with_idle = rooms[worker_id]
    budget = next(slot.budget_bytes for slot in found if slot.worker_id == worker_id)
    idle = f", {megabytes(with_idle)} with idle copies gone that nobody must have" if with_idle > free else ""
    return (
        f"a copy needs {megabytes(want.num_bytes)}; the most room is {megabytes(free)}{idle}, of "
        f"{megabytes(budget)} on {worker_id!r}"
    )


def _facts(slots: list[WorkerSlot], want: Want) -> Iterator[str]:
    num_leaving = sum(slot.is_leaving for slot in slots)
    num_barred = sum(slot.worker_id in want.barred and not slot.is_leaving for slot in slots)
    num_holding = sum(is_eligible(slot, want) for slot in slots)
    yield f"of {len(slots)} workers {num_holding} have a copy already"
    if num_leaving:
        yield f"{num_leaving} are leaving"
    if num_barred:
        yield f"{num_barred} may not hold it"


def megabytes(num_bytes: int) -> str:
    """For messages."""
    return f"{num_bytes / 1e6:,.1f} MB"
