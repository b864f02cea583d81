"""Virtual time: events in the order of their time, then of their planning. Called by workers, fleet and workloads.

It reads no clock of the machine and draws no number but from its own seeded generator, so the same seed gives the same
events in the same order.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

MAX_IDLE_EVENTS = 10_000
"""Events at one instant after which a simulation is taken to go in circles."""


class InvariantViolation(AssertionError):
    """Something that must always hold does not; the message says when, where and what."""


class Event:
    """Something that will happen, unless it is called off."""

    __slots__ = ("call", "time_s")

    def __init__(self, time_s: float, call: Callable[[], object]) -> None:
        self.time_s = time_s
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Calls it off; once it has happened, this does nothing."""
        self.call = None


class Simulation:
    """Mutable: the time, what is to come, randomness and the trace."""

    def __init__(self, seed: int, *, keep_trace: bool = False) -> None:
        """`keep_trace`: keeps every line said."""
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.after_event: Callable[[], None] = lambda: None
        """Called after every event: what must always hold is checked here."""
        self.num_events = 0
        self.keep_trace = keep_trace
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Event]] = []
        self._num_planned = 0
        self._num_at_instant = 0

    def at(self, time_s: float, call: Callable[[], object]) -> Event:
        """Plans a call; what is planned for the past happens now."""
        event = Event(max(time_s, self.now_s), call)
        self._num_planned += 1
        heapq.heappush(self._heap, (event.time_s, self._num_planned, event))
        return event

    def after(self, delay_s: float, call: Callable[[], object]) -> Event:
        """Plans a call so many seconds from now."""
        return self.at(self.now_s + delay_s, call)

    def say(self, *words: object) -> None:
        """Adds a line to the trace, if one is kept."""
        if self.keep_trace:
            self.trace.append(f"{self.now_s:.6f} " + " ".join(map(str, words)))

    def run(self, until_s: float = float("inf")) -> None:
        """Lets everything happen up to and at a time.

        Raises:
            InvariantViolation: something did not hold, or events follow each other without time passing.
        """
        while self._heap and self._heap[0][0] <= until_s:
            time_s, _, event = heapq.heappop(self._heap)
            if event.call is None:
                continue
            call, event.call = event.call, None
            self._num_at_instant = self._num_at_instant + 1 if time_s == self.now_s else 0
            if self._num_at_instant > MAX_IDLE_EVENTS:
                raise InvariantViolation(f"at {time_s:.6f} s: {MAX_IDLE_EVENTS} events without time passing")
            self.now_s = time_s
            self.num_events += 1
            call()
            self.after_event()

    def digest(self) -> str:
        """A hash over the kept trace: equal for equal runs."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()
