"""Idle copies that move to make room: each comes up at its new place before it leaves the old one. Pure.

Used by the keeper. A router that takes over knows nothing of them: then there is a copy more, which goes when spare.
"""

from __future__ import annotations

from collections.abc import Iterator

from naru_proto.placement import Defragmentation, HeldState
from naru_router.core.keeper.ledger import Ledger
from naru_router.core.keeper.model import Direction, KeeperView, Move, Reason


class Relocations:
    """Mutable."""

    def __init__(self) -> None:
        self._targets: dict[tuple[str, str], tuple[str, float]] = {}
        """(model, source) to the worker where it comes up first, and until when that is waited for."""

    def __bool__(self) -> bool:
        return bool(self._targets)

    def has(self, model: str) -> bool:
        """Whether a copy of the model is on its way."""
        return any(model == name for name, _ in self._targets)

    def begin(self, room: Defragmentation, until_s: float) -> list[Move]:
        """The copies that come up first."""
        self._targets = {(each.model, each.source): (each.target, until_s) for each in room.moves}
        why = "; ".join(room.reasons)
        return [Move(each.model, each.target, Direction.UP, Reason.DEFRAGMENT, why) for each in room.moves]

    def forget(self, move: Move) -> None:
        """The copy at the new place will not come."""
        self._targets = {p: target for p, target in self._targets.items() if (p[0], target[0]) != move.place}

    def finish(self, view: KeeperView, ledger: Ledger, now_s: float) -> Iterator[Move]:
        """Copies whose successor is ready leave; those whose successor does not come stay."""
        for place, (target, until_s) in list(self._targets.items()):
            name, source = place
            copies = view.copies.get(name, {})
            there, here = copies.get(target), copies.get(source)
            is_lost = there is None and target not in ledger.coming(name)
            if here is None or here.state is not HeldState.READY or is_lost or now_s > until_s:
                del self._targets[place]
            elif there is not None and there.state is HeldState.READY and not view.num_in_flight(source, name):
                del self._targets[place]
                yield Move(name, source, Direction.DOWN, Reason.DEFRAGMENT, f"it is ready on {target}")
