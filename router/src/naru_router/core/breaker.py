"""A circuit breaker for one model on one life of one worker: after faults in a row it is left alone for a while, then
tried by one request.

The fleet keeps one for each pair that has had a fault, makes `is_suspect` and `is_probe` of its views of it, and tells
it how requests ended. Time is passed in. What of a request's end is the worker's fault is for `is_fault` to say.

Every request is sent under a term, which `sent` gives and its outcome brings back: how a request of an earlier term
ends says nothing about the worker now.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_proto.errors import InternalError, Unavailable
from naru_router.core.retry import AttemptFailed, FailureKind


class Circuit(enum.Enum):
    """Whether requests go to the worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    """One request may try it."""
    PROBING = "probing"
    """That one is on its way."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When it opens, and for how long."""

    max_faults: int = 3
    """In a row, without a success between them."""
    min_pause_s: float = 1.0
    max_pause_s: float = 60.0
    """Pauses double from one failed try to the next."""
    max_probe_s: float = 60.0
    """A try without an outcome for so long is forgotten, and another one may be made."""


DEFAULTS = BreakerSettings()


def is_fault(failed: AttemptFailed) -> bool:
    """Whether a failed attempt speaks against the worker: not what a sound one says of a request."""
    if failed.kind is FailureKind.STREAM_LOST:
        return True
    # Unavailable, too: a worker that is about to leave says so here sooner than by its lease.
    return failed.kind is FailureKind.WORKER_ERROR and isinstance(failed.error, (InternalError, Unavailable))


class Breaker:
    """One worker's circuit. Mutable."""

    def __init__(self, settings: BreakerSettings = DEFAULTS) -> None:
        self._settings = settings
        self._term = 0
        self._num_faults = 0
        self._incident: object | None = None
        self._is_closed = True
        self._until_s = 0.0
        """End of the pause, or of the wait for the probe's outcome."""
        self._is_probing = False
        self._pause_s = settings.min_pause_s
        self.reason = ""
        """Why it is not closed."""

    def circuit(self, now_s: float) -> Circuit:
        """Where it stands."""
        if self._is_closed:
            return Circuit.CLOSED
        if now_s >= self._until_s:
            return Circuit.HALF_OPEN
        return Circuit.PROBING if self._is_probing else Circuit.OPEN

    def sent(self, now_s: float) -> int:
        """Notes that a request goes to the worker; its term, for its outcome. Makes it the probe where one is due."""
        if self.circuit(now_s) is Circuit.HALF_OPEN:
            self._term += 1
            self._num_faults, self._incident = 0, None
            self._is_probing = True
            self._until_s = now_s + self._settings.max_probe_s
        return self._term

    def succeeded(self, term: int) -> None:
        """The worker has served a request of that term, or begun to."""
        if term != self._term:
            return
        self._num_faults = 0
        self._incident = None
        if self._is_probing:
            self._is_closed, self._is_probing = True, False
            self._pause_s = self._settings.min_pause_s
            self.reason = ""

    def failed(self, term: int, now_s: float, reason: str, incident: object | None = None) -> None:
        """A request of that term has failed by the worker's fault.

        Args:
            term: as `sent` gave it.
            now_s: of any clock that does not go back.
            reason: for people.
            incident: equal for failures of one cause, such as the life of a stream that broke: they count once.
        """
        if term != self._term or (self._num_faults and incident is not None and incident is self._incident):
            return
        self._incident = incident
        self._num_faults += 1
        if self._is_probing:
            self._pause_s = min(self._pause_s * 2, self._settings.max_pause_s)
            self._open(now_s, reason)
        elif self._is_closed and self._num_faults >= self._settings.max_faults:
            self._open(now_s, f"{self._num_faults} faults in a row, the last one: {reason}")

    def abandoned(self, term: int, now_s: float) -> None:
        """A request of that term has ended without an outcome: its client left. Another one may try the worker."""
        if self._is_probing and term == self._term:
            self._is_probing = False
            self._until_s = now_s

    def trip(self, now_s: float, reason: str) -> None:
        """Opens a closed one for what is no failure of a request."""
        if self._is_closed:
            self._open(now_s, reason)

    def _open(self, now_s: float, reason: str) -> None:
        self._term += 1
        self._num_faults = 0
        self._incident = None
        self._is_closed = self._is_probing = False
        self._until_s = now_s + self._pause_s
        self.reason = reason
