"""How long and how many requests may wait for one model in one router: each keeps its prompt in memory.

Used by the dispatcher and by those who look for a model's facts. Who is refused hears when it is worth to ask again, in
front of a full room as at the end of the wait. A wait that the worker's own word makes hopeless is refused before it
begins; the load goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from naru_proto.errors import Overloaded, Unavailable
from naru_router.core.load_time import TimeLeft


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Of one model."""

    max_wait_s: float
    """Longest wait while no copy is ready."""
    max_depth: int
    """Most requests that wait."""


class WaitingRoom:
    """Counts the requests that wait, model by model."""

    def __init__(self, on_change: Callable[[str, int], None] | None = None) -> None:
        """`on_change` hears of a model, by the name for people, and how many wait for it; of models of the registry."""
        self._counts: dict[str, int] = {}
        self._on_change = on_change

    def seat(self, model: str, max_depth: int, retry_after_s: Callable[[], float] = lambda: 0.0) -> Seat:
        """A place for one request among at most `max_depth`, free until it is taken.

        Args:
            model: the name for people.
            max_depth: at least 1.
            retry_after_s: asked where all are taken: when it is worth to come again; 0: not known.
        """
        return Seat(self, model, max_depth, retry_after_s)

    def num_waiting(self, model: str) -> int:
        """Seats taken."""
        return self._counts.get(model, 0)

    def enter(self, model: str, max_depth: int, retry_after_s: Callable[[], float] = lambda: 0.0) -> None:
        """Takes a seat.

        Raises:
            Overloaded: all are taken.
        """
        count = self.num_waiting(model)
        if count >= max_depth:
            error = Overloaded(
                f"{count} requests wait for the model {model!r} to be loaded already; send it again later"
            )
            error.retry_after_s = retry_after_s()
            raise error
        self._set(model, count + 1)

    def leave(self, model: str) -> None:
        """Gives a seat back."""
        self._set(model, self._counts[model] - 1)

    def _set(self, model: str, count: int) -> None:
        if count:
            self._counts[model] = count
        else:
            del self._counts[model]
        if self._on_change is not None:
            self._on_change(model, count)


class Seat:
    """One request's place. Given back at the end of the context at the latest."""

    def __init__(self, room: WaitingRoom, model: str, max_depth: int, retry_after_s: Callable[[], float]) -> None:
        self._room = room
        self._model = model
        self._max_depth = max_depth
        self._retry_after_s = retry_after_s
        self._is_taken = False

    def take(self) -> None:
        """The request waits from now on; again: nothing.

        Raises:
            Overloaded: too many wait.
        """
        if not self._is_taken:
            self._room.enter(self._model, self._max_depth, self._retry_after_s)
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


@dataclass(frozen=True, slots=True)
class Outlook:
    """Who might serve a model that nobody has ready, at this instant."""

    num_coming: int = 0
    """Workers that could have it soon."""
    num_unaware: int = 0
    """Workers that do not know it yet."""
    failures: Sequence[str] = ()
    """Why some have failed to load it."""


def unavailable(model: str, outlook: Outlook, left: TimeLeft, *, is_over: bool) -> Unavailable:
    """What a request hears that waits no longer. `is_over`: its time is, else there is nobody to wait for."""
    if outlook.failures:
        text = f"the model {model!r} failed to load; {'; '.join(outlook.failures)}"
    elif not outlook.num_coming and outlook.num_unaware:
        text = f"no worker knows the model {model!r} yet; send the request again"
    elif outlook.num_coming and is_over:
        return still_loading(model, left)
    else:
        text = f"no worker holds the model {model!r} now; send the request again"
    error = Unavailable(text)
    error.retry_after_s = left.retry_after_s
    return error


def still_loading(model: str, left: TimeLeft) -> Unavailable:
    """What a request hears whose wait is over before its model's load is."""
    error = Unavailable(f"the model {model!r} is still loading{_about(left)}; send the request again")
    error.retry_after_s = left.retry_after_s
    return error


def check_hope(model: str, left: TimeLeft, rest_s: float) -> None:
    """Refuses a wait of at most `rest_s` that cannot be enough by the worker's own word.

    Raises:
        Unavailable: with when to come again.
    """
    if left.is_hopeless(rest_s):
        error = Unavailable(
            f"the model {model!r} is being loaded{_about(left)}, and the request may wait {rest_s:.3g} s; send it again"
        )
        error.retry_after_s = left.retry_after_s
        raise error


def _about(left: TimeLeft) -> str:
    return f", about {math.ceil(left.retry_after_s)} s more" if left.left_s > 0 else ""
