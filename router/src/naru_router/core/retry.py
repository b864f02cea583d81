"""Whether a failed attempt is tried elsewhere. Pure; the request's life carries it out.

Only as long as the client cannot tell: it has seen no byte, or the other worker goes on where the first one was lost.
How often depends on what happened:

- The client's own faults, and what no worker would do better: never.
- A worker does not hold the model after all: always, as that was rather a question; each worker is asked once.
- A worker is busy: one other one is asked, no third. Where all are busy, asking around only adds to it.
- A worker fails: as often as the model's `max_retries` says, within the budget (core.retry_budget).
- A worker is lost: up to MAX_ATTEMPTS in all. But a request that two workers were lost with may be what kills them, and
  gets no third one.

The first move away from a worker that is lost, or says that it is about to leave, is free of the budget: all that it
had needs another place at once, and moves once, where a retry in a storm is made again and again.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from naru_proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NaruError,
    Overloaded,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
)

MAX_ATTEMPTS = 3
"""Of a request that loses its workers."""
MAX_LOSSES = 2
"""Workers that may be lost while they run one request."""
_FINAL = (InvalidRequest, Unauthenticated, QuotaExceeded, Cancelled, DeadlineExceeded)
"""True wherever it is asked."""


class FailureKind(enum.Enum):
    """What went wrong on a worker."""

    WORKER_ERROR = "worker_error"
    STREAM_LOST = "stream_lost"
    SHUTDOWN = "shutdown"
    """This router is going away."""


class AttemptFailed(Exception):
    """One attempt on one worker has failed."""

    def __init__(self, error: NaruError, kind: FailureKind, *, is_retryable: bool, may_have_run: bool = True) -> None:
        """`may_have_run`: False where the request surely never got to the worker's engine."""
        super().__init__(error.message)
        self.error = error
        self.kind = kind
        self.is_retryable = is_retryable
        self.may_have_run = may_have_run

    @property
    def is_not_loaded(self) -> bool:
        """True when the worker does not hold the model the route map says it holds."""
        return isinstance(self.error, ModelNotFound)

    @property
    def is_refusal(self) -> bool:
        """True when the worker was too busy."""
        return isinstance(self.error, Overloaded) and not isinstance(self.error, QuotaExceeded)

    @property
    def is_deadly(self) -> bool:
        """True when the worker was lost, and the request may have been the reason."""
        return self.kind is FailureKind.STREAM_LOST and self.may_have_run


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """Try elsewhere, or tell the client `error`."""

    is_retry: bool
    error: NaruError
    reason: str
    may_raise: bool = False
    """Whether a worker may be asked to load the model for the next attempt. Not where a copy only refused: a busy one
    would else have other models evicted for a second one.
    """
    counts: bool = True
    """Whether the attempt counts: a worker that does not hold the model was rather asked a question."""
    spends: bool = False
    """Whether the retry is to be taken from the budget."""


def decide_retry(
    failed: AttemptFailed,
    *,
    num_attempts: int,
    has_sent: bool,
    can_go_on: bool = False,
    was_held: bool = False,
    max_retries: int = 1,
    may_spend: bool = True,
    remaining_s: float = math.inf,
    num_refusals: int = 0,
    num_losses: int | None = None,
) -> RetryDecision:
    """Decides after attempt number `num_attempts` (from 1) has failed.

    Args:
        failed: how it failed.
        num_attempts: made so far.
        has_sent: the client has seen output.
        can_go_on: there is output, and another worker can be told all of it and go on from there.
        was_held: the attempt waited for the model to load.
        max_retries: of the model: tries on other workers before the first byte.
        may_spend: the budget has a retry left.
        remaining_s: until the request's deadline.
        num_refusals: earlier attempts that met a busy worker.
        num_losses: earlier attempts that were `is_deadly`; None: all of them may have been.
    """
    error = failed.error
    if failed.is_not_loaded:
        # The model exists, or it would have been refused before: this is no fault of the client's.
        error = Unavailable(f"the worker has just let the model go; send the request again ({error.message})")
    if has_sent and not can_go_on:
        return RetryDecision(False, error, "the client has seen output")
    if remaining_s <= 0:
        if not isinstance(error, DeadlineExceeded):  # a worker's own word for it says all
            error = DeadlineExceeded(f"the request's time is over; allow more of it ({error.message})")
        return RetryDecision(False, error, "its time is over")
    if failed.is_not_loaded:
        return RetryDecision(True, error, "not_loaded", may_raise=True, counts=False)
    is_lost = failed.kind is FailureKind.STREAM_LOST
    is_first_loss = num_attempts == 1 and (is_lost or isinstance(error, Unavailable))
    ended = _ended(failed, num_attempts, can_go_on, max_retries, num_refusals, num_losses)
    if not ended and not (is_first_loss or may_spend):
        ended = "the budget of retries is used up"
    if ended:
        return RetryDecision(False, error, ended)
    may_raise = (was_held and not failed.is_refusal) or is_lost
    return RetryDecision(True, error, failed.kind.value, may_raise, spends=not is_first_loss)


def _ended(
    failed: AttemptFailed,
    num_attempts: int,
    can_go_on: bool,
    max_retries: int,
    num_refusals: int,
    num_losses: int | None,
) -> str:
    """Why the request has been tried often enough; empty: it has not."""
    if not failed.is_retryable or isinstance(failed.error, _FINAL):
        return "no other worker would do better"
    if failed.is_refusal and num_refusals:
        return f"{num_refusals + 1} workers are busy"
    if failed.is_deadly and (num_attempts - 1 if num_losses is None else num_losses) + 1 >= MAX_LOSSES:
        return f"{MAX_LOSSES} workers were lost while they ran it"
    limit = 1 + max_retries
    if can_go_on or (failed.kind is FailureKind.STREAM_LOST and max_retries):
        limit = max(limit, MAX_ATTEMPTS)
    return f"tried {num_attempts} times" if num_attempts >= limit else ""
