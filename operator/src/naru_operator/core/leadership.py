"""Who may act: one holder of a lease, judged by how long its record has stood still here. Pure; called by the election.

Every replica looks at the record and remembers, on its own monotonic clock, when it first saw it as it is. A record
that has not changed for its whole duration has no living holder. The holder counts from before it sent its last
successful write, and stops a good while earlier. Wall clocks are written into the record for people and never read.

Two replicas never act at once as long as no clock runs more than ``lease_s / deadline_s`` as fast as another one and
the record is not deleted by hand.

Source: the leader election of client-go (tools/leaderelection), whose way of judging this is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MAX_LEASE_S = 300.0
"""No record is waited for longer than this, whatever it says."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long what holds, seconds; ``renew_s`` < ``deadline_s`` < ``lease_s``."""

    lease_s: float = 15.0
    """Others wait for this long since the record last changed."""
    deadline_s: float = 10.0
    """The holder acts for this long since it sent its last successful write."""
    renew_s: float = 3.0
    """Between writes of the holder, and between looks of the others."""

    def __post_init__(self) -> None:
        """Checks the order."""
        assert 0 < self.renew_s < self.deadline_s < self.lease_s, self


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the lease says. Two equal records are the same sight."""

    holder: str
    """Empty: free."""
    duration_s: float
    renewed_at: str
    """The holder's wall clock, only compared."""
    version: str
    """The object's resourceVersion: what a write must name."""
    acquired_at: str = ""
    """As the holder told it, for people."""
    num_transitions: int = 0


class Move(Enum):
    """What to do about the lease now."""

    ACQUIRE = "acquire"
    RENEW = "renew"
    WAIT = "wait"
    STEP_DOWN = "step down"


@dataclass(frozen=True, slots=True)
class Decision:
    """A move with its reason."""

    move: Move
    reason: str


def decide(
    record: LeaseRecord | None,
    seen_s: float,
    identity: str,
    held_until_s: float | None,
    now_s: float,
    timing: Timing,
) -> Decision:
    """What a replica does, seeing ``record`` unchanged since ``seen_s``.

    ``record`` None: there is no lease. ``held_until_s``: this replica may act until then; None: it does not act. All
    times are of its own monotonic clock. No two replicas may share an ``identity``.
    """
    if held_until_s is not None:
        if now_s >= held_until_s:
            return Decision(Move.STEP_DOWN, f"the lease could not be renewed for {timing.deadline_s:g} s")
        if record is not None and record.holder not in (identity, ""):
            return Decision(Move.STEP_DOWN, f"{record.holder!r} holds the lease")
        return Decision(Move.RENEW, "this replica holds the lease")
    if record is None or record.holder in (identity, ""):
        return Decision(Move.ACQUIRE, "the lease is free, or this replica's from before")
    if now_s - seen_s >= min(max(record.duration_s, timing.lease_s), _MAX_LEASE_S):
        return Decision(Move.ACQUIRE, f"{record.holder!r} has not renewed the lease for {now_s - seen_s:.0f} s")
    return Decision(Move.WAIT, f"{record.holder!r} holds the lease")


class Candidate:
    """One replica's view of the lease and of its own right to act."""

    def __init__(self, identity: str, timing: Timing) -> None:
        self.identity = identity
        self.timing = timing
        self._record: LeaseRecord | None = None
        self._seen_s = 0.0
        self._held_until_s: float | None = None

    @property
    def record(self) -> LeaseRecord | None:
        """The lease as last seen or written."""
        return self._record

    @property
    def held_until_s(self) -> float | None:
        """This replica may act before then; None: it may not act."""
        return self._held_until_s

    def is_leader(self, now_s: float) -> bool:
        """Whether this replica may act now, even if nobody has asked ``decide`` since its time ran out."""
        return self._held_until_s is not None and now_s < self._held_until_s

    def decide(self, now_s: float) -> Decision:
        """What to do now."""
        return decide(self._record, self._seen_s, self.identity, self._held_until_s, now_s, self.timing)

    def saw(self, record: LeaseRecord | None, now_s: float) -> None:
        """The lease was read; ``now_s`` is when the answer came."""
        if record != self._record or record is None:
            self._record, self._seen_s = record, now_s

    def wrote(self, record: LeaseRecord, sent_s: float, now_s: float) -> None:
        """A write that makes this replica the holder succeeded; ``sent_s`` is before it was sent."""
        self.saw(record, now_s)
        self._held_until_s = sent_s + self.timing.deadline_s

    def step_down(self) -> None:
        """This replica acts no more, until it acquires the lease anew."""
        self._held_until_s = None
