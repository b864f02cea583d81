"""How long and how many requests may wait for one model in one router: each keeps its prompt in memory.

Used by the dispatcher and by those who look for a model's facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from naru_proto.errors import Overloaded


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Of one model."""

    max_wait_s: float
    """Longest wait while no copy is ready."""
    max_depth: int
    """Most requests that wait."""


class WaitingRoom:
    """Counts the requests that wait, model by model."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def seat(self, model: str, max_depth: int) -> Seat:
        """A place for one request among at most `max_depth`, free until it is taken."""
        return Seat(self, model, max_depth)

    def num_waiting(self, model: str) -> int:
        """Seats taken."""
        return self._counts.get(model, 0)

    def enter(self, model: str, max_depth: int) -> None:
        """Takes a seat.

        Raises:
            Overloaded: all are taken.
        """
        count = self.num_waiting(model)
        if count >= max_depth:
            raise Overloaded(f"{count} requests wait for the model {model!r} to be loaded already; send it again later")
        self._counts[model] = count + 1

    def leave(self, model: str) -> None:
        """Gives a seat back."""
        self._counts[model] -= 1
        if not self._counts[model]:
            del self._counts[model]


class Seat:
    """One request's place. Given back at the end of the context at the latest."""

    def __init__(self, room: WaitingRoom, model: str, max_depth: int) -> None:
        self._room = room
        self._model = model
        self._max_depth = max_depth
        self._is_taken = False

    def take(self) -> None:
        """The request waits from now on; again: nothing.

        Raises:
            Overloaded: too many wait.
        """
        if not self._is_taken:
            self._room.enter(self._model, self._max_depth)
            self._is_taken = True

    def leave(self) -> None:
        """The request waits no longer."""
        if self._is_taken:
            self._is_taken = False
            self._room.leave(self._model)

    def __enter__(self) -> Seat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
