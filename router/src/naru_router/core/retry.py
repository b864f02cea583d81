"""Whether a failed attempt is tried elsewhere. Pure; the request's life carries it out.

One more attempt on another worker, as long as the client cannot tell: it has seen no byte, or the other worker goes on
where the first one was lost.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_proto.errors import ModelNotFound, NaruError, Overloaded, Unavailable

MAX_ATTEMPTS = 2
"""The first and one retry: a request that kills workers kills at most two."""


class FailureKind(enum.Enum):
    """What went wrong on a worker."""

    WORKER_ERROR = "worker_error"
    STREAM_LOST = "stream_lost"
    SHUTDOWN = "shutdown"
    """This router is going away."""


class AttemptFailed(Exception):
    """One attempt on one worker has failed."""

    def __init__(self, error: NaruError, kind: FailureKind, *, is_retryable: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.kind = kind
        self.is_retryable = is_retryable

    @property
    def is_not_loaded(self) -> bool:
        """True when the worker does not hold the model the route map says it holds."""
        return isinstance(self.error, ModelNotFound)


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


def decide_retry(
    failed: AttemptFailed, *, num_attempts: int, has_sent: bool, can_go_on: bool = False, was_held: bool = False
) -> RetryDecision:
    """Decides after attempt number `num_attempts` (from 1) has failed.

    Args:
        failed: how it failed.
        num_attempts: made so far.
        has_sent: the client has seen output.
        can_go_on: another worker can be told all the output there is, and go on from it.
        was_held: the attempt waited for the model to load.
    """
    error = failed.error
    if failed.is_not_loaded:
        # The model exists, or it would have been refused before: this is no fault of the client's.
        error = Unavailable(f"the worker has just let the model go; send the request again ({error.message})")
    if has_sent and not can_go_on:
        return RetryDecision(False, error, "the client has seen output")
    if failed.is_not_loaded:
        return RetryDecision(True, error, "not_loaded", may_raise=True, counts=False)
    if not failed.is_retryable:
        return RetryDecision(False, error, "no other worker would do better")
    if num_attempts >= MAX_ATTEMPTS:
        return RetryDecision(False, error, f"tried {num_attempts} times")
    is_busy = isinstance(error, Overloaded)
    may_raise = (was_held and not is_busy) or failed.kind is FailureKind.STREAM_LOST
    return RetryDecision(True, error, failed.kind.value, may_raise)
