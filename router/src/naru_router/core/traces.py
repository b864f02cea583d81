"""What was decided for the last requests, without any of their content: what `naru explain request` shows.

Written by the dispatcher, read by a page. Bounded; times are seconds since the request came.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from naru_router.core.routing.model import Decision

RUNNING = "running"
MAX_ATTEMPTS_SHOWN = 8
MAX_OUTCOME_CHARS = 500
"""An error's message may come from a worker, as long as that likes."""


@dataclass(slots=True)
class AttemptTrace:
    """One try on one worker."""

    decision: Decision
    model: str
    """That it was for; another one than the request's where that stands in for it."""
    is_held: bool
    at_s: float
    """When it was sent."""
    first_s: float = 0.0
    """When the first output came; 0: none has."""
    cached_tokens: int = 0
    outcome: str = RUNNING

    def end(self, outcome: str) -> None:
        """Notes how it ended."""
        self.outcome = outcome[:MAX_OUTCOME_CHARS]


@dataclass(slots=True)
class RequestTrace:
    """One request's course."""

    request_id: str
    tenant: str
    model: str
    num_tokens: int
    """Of the prompt, as estimated."""
    num_keys: int
    priority: int
    began_s: float
    """On the router's monotonic clock."""
    attempts: list[AttemptTrace] = field(default_factory=list)
    outcome: str = RUNNING
    total_s: float = 0.0
    num_tokens_used: int = 0
    """Of prompt and output, computed so far."""

    def add(self, decision: Decision, *, is_held: bool, now_s: float, model: str = "") -> AttemptTrace:
        """Notes a try, for the request's own model where none is named; of very many, the last ones are kept."""
        attempt = AttemptTrace(decision, model or self.model, is_held, now_s - self.began_s)
        self.attempts.append(attempt)
        del self.attempts[:-MAX_ATTEMPTS_SHOWN]
        return attempt

    def end(self, outcome: str, now_s: float) -> None:
        """Notes how it ended."""
        self.outcome = outcome[:MAX_OUTCOME_CHARS]
        self.total_s = now_s - self.began_s


class Traces:
    """The last `capacity` requests by tenant and id. A later one of the same id takes its place."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[tuple[str, str], RequestTrace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, trace: RequestTrace) -> None:
        """Adds one; the oldest goes."""
        if not trace.request_id or not self._capacity:
            return
        key = (trace.tenant, trace.request_id)
        self._kept[key] = trace
        self._kept.move_to_end(key)
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def get(self, request_id: str, tenant: str) -> RequestTrace | None:
        """The course of a request of this tenant."""
        return self._kept.get((tenant, request_id))


def trace_json(trace: RequestTrace) -> dict[str, object]:
    """As the page shows it."""
    return {
        "request_id": trace.request_id,
        "model": trace.model,
        "estimated_prompt_tokens": trace.num_tokens,
        "route_keys": trace.num_keys,
        "priority": trace.priority,
        "outcome": trace.outcome,
        "total_s": round(trace.total_s, 6),
        "attempts": [_attempt_json(attempt) for attempt in trace.attempts],
    }


def _attempt_json(attempt: AttemptTrace) -> dict[str, object]:
    decision = attempt.decision
    return {
        "worker": decision.worker_id,
        "model": attempt.model,
        "held": attempt.is_held,
        "sent_at_s": round(attempt.at_s, 6),
        "first_output_at_s": round(attempt.first_s, 6) if attempt.first_s else None,
        "expected_first_output_s": round(decision.expected_s, 6) if decision.expected_s else None,
        "expected_cached_tokens": decision.expected_cached_tokens,
        "cached_tokens": attempt.cached_tokens,
        "reasons": list(decision.reasons),
        "scores_s": {worker: round(score, 6) for worker, score in decision.scores_s.items()},
        "outcome": attempt.outcome,
    }
