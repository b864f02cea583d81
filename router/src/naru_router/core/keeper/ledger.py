"""What the keeper has moved and what came of it: open moves, pauses of models, workers that refused. Pure.

Only the router that is keeper has entries; one that takes over begins with none and sees by the copies what goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from naru_proto.placement import HeldState
from naru_router.core.keeper.model import UP_STATES, Direction, KeeperLimits, KeeperView, Move

_REFUSAL_PAUSE_S = 1.0
"""A model whose move one worker refused may be moved elsewhere soon; that worker is left alone for longer."""
_REFUSAL_COOL_DOWNS = 3.0
_STAYS_RESIDENCIES = 2.0
"""A copy that is lost within so many minimum residencies was not worth its load."""


@dataclass(slots=True)
class Open:
    """A move under way. Mutable."""

    move: Move
    begun_s: float
    is_seen: bool = False
    """The copy is on its way, by its worker's words."""


class Ledger:
    """Mutable. Times are of one clock that never goes back."""

    def __init__(self, limits: KeeperLimits) -> None:
        self._limits = limits
        self._open: dict[tuple[str, str], Open] = {}
        self._next_s: dict[str, float] = {}
        self._barred_s: dict[tuple[str, str], float] = {}
        self._num_losses: dict[str, int] = {}
        self._raised_s: dict[tuple[str, str], float] = {}
        """Copies that came up for a move, until it is known whether they stay."""

    @property
    def num_open(self) -> int:
        """Moves under way."""
        return len(self._open)

    def coming(self, model: str) -> Iterator[str]:
        """Workers that were told to bring the model up and have not yet."""
        return (o.move.worker_id for o in self._open.values() if o.move.model == model and o.move.direction is _UP)

    def going(self, model: str) -> Iterator[str]:
        """Workers that were told to take the model down and have not yet."""
        return (o.move.worker_id for o in self._open.values() if o.move.model == model and o.move.direction is _DOWN)

    def begin(self, move: Move, now_s: float) -> None:
        """Notes a move that is about to be asked for."""
        self._open[move.place] = Open(move, now_s)
        self._next_s[move.model] = max(self._next_s.get(move.model, 0.0), now_s + self._limits.cool_down_s)
        if move.direction is _DOWN:
            self._raised_s.pop(move.place, None)

    def refuse(self, move: Move, now_s: float) -> None:
        """Notes that a worker refused or did not answer."""
        self._open.pop(move.place, None)
        self._barred_s[move.place] = now_s + _REFUSAL_COOL_DOWNS * self._limits.cool_down_s
        self._next_s[move.model] = now_s + _REFUSAL_PAUSE_S

    def rest(self, model: str, now_s: float) -> None:
        """Notes that a copy of the model is about to make room for another's."""
        self._next_s[model] = max(self._next_s.get(model, 0.0), now_s + self._limits.cool_down_s)

    def postpone(self, move: Move, now_s: float) -> None:
        """Notes that a move was not asked for: somebody else acts on the model at the moment."""
        self._open.pop(move.place, None)
        self._next_s[move.model] = now_s + self._limits.starved_s

    def may_move(self, model: str, now_s: float) -> bool:
        """Whether the model's pause is over."""
        return now_s >= self._next_s.get(model, 0.0)

    def pause_s(self, model: str, now_s: float) -> float:
        """Seconds left of the model's pause."""
        return max(0.0, self._next_s.get(model, 0.0) - now_s)

    def barred(self, model: str, now_s: float) -> frozenset[str]:
        """Workers that refused a move of the model lately."""
        return frozenset(
            worker for (name, worker), until_s in self._barred_s.items() if name == model and now_s < until_s
        )

    def settle(self, view: KeeperView, now_s: float) -> None:
        """Closes the moves that are done or lost, by what the view shows."""
        for place, entry in list(self._open.items()):
            is_over = self._settle_up(view, entry, now_s) if entry.move.direction is _UP else _is_down(view, entry)
            is_late = now_s - entry.begun_s > (
                self._limits.move_deadline_s if entry.is_seen else self._limits.pending_s
            )
            if is_over or is_late:
                del self._open[place]
            if is_late and not is_over:
                self._lose(entry.move, now_s)
        self._look_after_raised(view, now_s)
        self._barred_s = {place: until_s for place, until_s in self._barred_s.items() if now_s < until_s}
        gone = [model for model in self._next_s if model not in view.models]
        for model in gone:
            self._next_s.pop(model)
            self._num_losses.pop(model, None)

    def _settle_up(self, view: KeeperView, entry: Open, now_s: float) -> bool:
        model, worker_id = entry.move.place
        slot = view.by_worker.get(worker_id)
        if slot is None:
            return True
        held = slot.holding.get(model)
        if held is not None and held.state is HeldState.READY:
            self._raised_s[entry.move.place] = now_s
            return True
        if held is not None and held.state is HeldState.COMING:
            entry.is_seen = True
            return False
        is_failed = model in slot.failed or (held is not None and held.state is HeldState.FAILED)
        if is_failed or entry.is_seen:
            self._lose(entry.move, now_s)
            return True
        return False

    def _look_after_raised(self, view: KeeperView, now_s: float) -> None:
        """A model whose copies do not stay rests longer and longer before the next one."""
        for place, raised_s in list(self._raised_s.items()):
            model, worker_id = place
            slot = view.by_worker.get(worker_id)
            held = slot.holding.get(model) if slot is not None else None
            if slot is None or slot.is_leaving:
                del self._raised_s[place]
            elif held is None or held.state not in UP_STATES:
                del self._raised_s[place]
                self._lose_copy(model, now_s)
            elif now_s - raised_s >= _STAYS_RESIDENCIES * self._limits.min_residency_s:
                del self._raised_s[place]
                self._num_losses.pop(model, None)

    def _lose(self, move: Move, now_s: float) -> None:
        self._barred_s[move.place] = now_s + _REFUSAL_COOL_DOWNS * self._limits.cool_down_s
        self._lose_copy(move.model, now_s)

    def _lose_copy(self, model: str, now_s: float) -> None:
        losses = self._num_losses[model] = min(self._num_losses.get(model, 0) + 1, 30)
        pause_s = min(self._limits.max_cool_down_s, self._limits.cool_down_s * 2.0**losses)
        self._next_s[model] = max(self._next_s.get(model, 0.0), now_s + pause_s)


_UP, _DOWN = Direction.UP, Direction.DOWN


def _is_down(view: KeeperView, entry: Open) -> bool:
    model, worker_id = entry.move.place
    held = view.copies.get(model, {}).get(worker_id)
    return held is None or held.state is not HeldState.READY
