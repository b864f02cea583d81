"""`defragment`: moves of idle copies that make room for one that fits nowhere. Pure. Called by the keeper.

Memory can be free and yet of no use: a piece here, a piece there. Only idle, unpinned copies of models that are wanted
are moved, each to free room on another worker, as few bytes as will do, and never more than the given number at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naru_proto.placement.model import Held, Want, WorkerSlot
from naru_proto.placement.place import Board, place
from naru_proto.placement.preference import Surroundings, offer
from naru_proto.placement.room import fits, is_eligible, megabytes, room_bytes

MAX_CANDIDATES = 12
"""Copies of one worker that are looked at together."""


@dataclass(frozen=True, slots=True)
class CopyMove:
    """A copy to bring up on `target`, and then to take off `source`."""

    model: str
    source: str
    target: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Defragmentation:
    """Moves, and what for. No moves: nothing is missing, or nothing helps."""

    moves: tuple[CopyMove, ...] = ()
    for_model: str = ""
    worker_id: str = ""
    """Where its room comes to be."""
    reasons: tuple[str, ...] = ()


def defragment(wants: Iterable[Want], slots: Iterable[WorkerSlot], max_moves: int = 4) -> Defragmentation:
    """Room for the first of the wanted models that fit nowhere and can be helped."""
    by_model = {want.model: want for want in wants}
    slots = sorted(slots, key=lambda slot: slot.worker_id)
    placement = place(by_model.values(), slots)
    missing = {each.model for each in placement.unplaced}
    board = Board(slots)
    for want in by_model.values():
        board.keep(want)
    if any(copy.is_new for copies in placement.copies.values() for copy in copies):
        # What fits is placed first: it may take the room that moves would need.
        return Defragmentation()
    for want in sorted(by_model.values(), key=lambda each: each.order):
        if want.model not in missing or want.num_bytes == 0:
            continue
        plans = [plan for slot in slots if (plan := _plan(want, slot, by_model, board, max_moves)) is not None]
        if plans:
            num_bytes, _, worker_id, moves = min(plans, key=lambda plan: plan[:3])
            why = (
                f"{want.model} needs {megabytes(want.num_bytes)} and fits nowhere; "
                f"moving {megabytes(num_bytes)} of idle copies off {worker_id!r} makes room"
            )
            return Defragmentation(moves, want.model, worker_id, (why,))
    return Defragmentation()


_Plan = tuple[int, int, str, tuple[CopyMove, ...]]
"""(bytes moved, number of moves, worker, moves)."""


def _plan(want: Want, slot: WorkerSlot, wants: Mapping[str, Want], board: Board, max_moves: int) -> _Plan | None:
    """The cheapest moves that make room on one worker."""
    if not is_eligible(slot, want) or want.model in slot.holding or slot.budget_bytes <= 0:
        return None
    needed = want.share_bytes * want.num_accelerators
    # They leave by themselves for a copy that is placed.
    spare = set(board.evictable(slot))
    movable = {
        name: held
        for name, held in slot.holding.items()
        if held.is_idle and held.num_bytes > 0 and name in wants and name not in spare
    }
    missing = needed - room_bytes(slot, {}, spare, want.num_accelerators)
    candidates = _candidates(movable, missing)
    sets = (chosen for size in range(1, max_moves + 1) for chosen in itertools.combinations(candidates, size))
    sized = sorted((sum(movable[name].num_bytes for name in chosen), len(chosen), chosen) for chosen in sets)
    for num_bytes, count, chosen in sized:
        if not fits(slot, want, {}, {*spare, *chosen}):
            continue
        moves = _targets(chosen, slot, wants, list(board.slots.values()))
        if moves is not None:
            return num_bytes, count, slot.worker_id, moves
    return None


def _candidates(movable: Mapping[str, Held], missing: int) -> list[str]:
    """The smallest that alone are enough, and the largest that are not."""
    order = sorted(movable, key=lambda name: (movable[name].num_bytes, name))
    enough = [name for name in order if movable[name].num_bytes >= missing]
    less = [name for name in order if movable[name].num_bytes < missing]
    return sorted(enough[: MAX_CANDIDATES // 2] + less[-(MAX_CANDIDATES - MAX_CANDIDATES // 2) :])


def _targets(
    chosen: Iterable[str], source: WorkerSlot, wants: Mapping[str, Want], slots: list[WorkerSlot]
) -> tuple[CopyMove, ...] | None:
    """Where each goes, the largest first; None: not all fit elsewhere."""
    board = Board(slots)
    moves = []
    for name in sorted(chosen, key=lambda each: (-source.holding[each].num_bytes, each)):
        held, want = source.holding[name], wants[name]
        others = [s for s in board.holders(name) if s.worker_id != source.worker_id and not s.is_leaving]
        # Sized as it is now: KV that has grown comes up again.
        moved = Want(name, want.pools, 1, held.num_bytes, want.num_accelerators, want.spread_key, barred=want.barred)
        around = Surroundings(moved, slots, others)
        most_in_domain = around.num_in_domain(source)
        offers = [
            each
            for slot in slots
            if slot.worker_id != source.worker_id
            and name not in slot.holding
            and name not in slot.failed
            and slot.budget_bytes > 0
            and is_eligible(slot, moved)
            and around.num_in_domain(slot) <= most_in_domain
            and (each := offer(slot, moved, around, board.added(slot.worker_id), ())) is not None
        ]
        if not offers:
            return None
        best = min(offers, key=lambda each: each.key)
        board.put(moved, best.slot)
        moves.append(CopyMove(name, source.worker_id, best.slot.worker_id, held.num_bytes))
    return tuple(moves)
