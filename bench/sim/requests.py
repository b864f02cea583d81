"""Requests of a simulation and how they end. Called by the simulated worker; the outcome is written exactly once."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from bench.sim.clock import Event, InvariantViolation


class Outcome(enum.Enum):
    """How a request ended."""

    SERVED = "served"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable: one request from its arrival to its end."""

    number: int
    model: str
    arrived_s: float
    duration_s: float
    max_wait_s: float
    found_loaded: bool = False
    started_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    timer: Event | None = None
    """Its expiry while it waits, its end while it runs."""

    def end(self, outcome: Outcome, reason: str, now_s: float) -> None:
        """Writes down the end.

        Raises:
            InvariantViolation: it has ended before, or fails without a reason.
        """
        if self.outcome is not None:
            raise InvariantViolation(f"request {self.number} ends as {outcome.value} after it was {self.outcome.value}")
        if outcome is Outcome.FAILED and not reason:
            raise InvariantViolation(f"request {self.number} fails without a reason")
        if self.timer is not None:
            self.timer.cancel()
        self.outcome, self.reason, self.ended_s = outcome, reason, now_s

    @property
    def wait_s(self) -> float:
        """Until it began. One that never did counts with its whole patience, so that a refusal is no short wait."""
        return self.max_wait_s if self.started_s is None else self.started_s - self.arrived_s


@dataclass(slots=True, eq=False)
class Lane:
    """Mutable: the requests of one model on one worker."""

    held: dict[int, Request] = field(default_factory=dict)
    running: dict[int, Request] = field(default_factory=dict)
    last_used_s: float = 0.0
    """When the last request came, began or ended."""
    is_open: bool = False
    """Requests go to the engine."""
