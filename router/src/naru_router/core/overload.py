"""Whether a request is worth sending, or is refused at once with the time at which it may be worth it.

Called by the dispatcher before a request's first attempt. Work that will be too late is the reason why overloaded
services collapse: they are busy all the time, with requests that nobody waits for any more. What is refused here costs
microseconds; what is admitted is served in time.

    wait   = least over the workers of max(waiting tokens ÷ prefill rate, wait observed there) × share of the tenant
    weight = priority_ratio ** priority     the queue as this priority feels it: workers serve lower numbers first
    limit:    wait × weight > max_wait                    → refused; free when the queue has shrunk to the limit
    deadline: min(wait, wait × weight) + own > remaining  → refused; free when it has shrunk by what is too much

At any length of the queue, whoever is refused at one priority is refused at each worse one, too. As the limits of two
priorities differ by a factor, the worse one is shed for as long as the queue is between them: all of it before any of
the better one. Nothing is refused where nothing is measured.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.errors import DeadlineExceeded, Overloaded
from naru_router.core.routing.cost import compare
from naru_router.core.routing.model import RouteRequest, WorkerView

_MAX_STEPS = 32
"""Priorities beyond differ no more: their limits are hours and milliseconds."""
_MIN_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ShedLimits:
    """How long requests may have to wait for their turn."""

    max_wait_s: float = 10.0
    """At priority 0."""
    priority_ratio: float = 1.2
    """From one priority to the next one; above 1."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, and when again."""

    reason: str
    wait_s: float
    """On the worker where it would be shortest."""
    retry_after_s: float
    """When this request would be admitted if no other came; 0: its own prompt takes longer than it has time."""

    def error(self, model: str) -> Overloaded | DeadlineExceeded:
        """What the client is told."""
        if not self.retry_after_s:
            return DeadlineExceeded(f"the model {model!r} cannot answer in time: {self.reason}; give it more time")
        error = Overloaded(
            f"the workers of the model {model!r} are busy: {self.reason}; "
            f"send it again in {math.ceil(self.retry_after_s)} s"
        )
        error.retry_after_s = self.retry_after_s
        return error


DEFAULTS = ShedLimits()


def admit(
    views: Sequence[WorkerView],
    request: RouteRequest,
    limits: ShedLimits = DEFAULTS,
    *,
    priority: int = 0,
    remaining_s: float = math.inf,
    share: float = 1.0,
) -> Refusal | None:
    """Judges a request for a model that is ready on at least one worker; None: it may be sent.

    Args:
        views: as for `route`; those that are suspect or leaving count where no other is there.
        request: as for `route`.
        limits: how long it may wait.
        priority: lower is sooner; 0 is normal.
        remaining_s: until its deadline.
        share: the part of the queue that its tenant waits for, in (0, 1]; see core.tenant_queues.
    """
    sound = [view for view in views if not (view.is_leaving or view.is_suspect or view.is_probe)]
    costs = compare(sound or views, request)
    found = [costs.at(index) for index in range(len(costs.views))]
    if not costs.is_measured and not any(each.view.observed_wait_s > 0 for each in found):
        return None
    waits_s = [max(each.wait_s + each.steps_ahead_s, _finite(each.view.observed_wait_s)) * share for each in found]
    wait_s = min(waits_s)
    weight = limits.priority_ratio ** max(-_MAX_STEPS, min(_MAX_STEPS, priority))
    limit_s = limits.max_wait_s / weight
    over_limit_s = wait_s - limit_s
    felt = min(1.0, weight)
    own_s = [each.own_s + each.steps_s - each.steps_ahead_s for each in found]
    needed_s = min(wait * felt + own for wait, own in zip(waits_s, own_s, strict=True))
    if over_limit_s <= 0 and needed_s <= remaining_s:
        return None
    if over_limit_s > 0:
        reason = f"a request waits {wait_s:.3g} s for its turn, and at priority {priority} at most {limit_s:.3g} s"
    else:
        reason = f"the first token would take {needed_s:.3g} s, and its deadline is in {max(0.0, remaining_s):.3g} s"
    over_deadline_s = min(
        # A worker that takes too long without any queue never will be in time.
        (wait - max(0.0, remaining_s - own) / felt if own <= remaining_s else math.inf)
        for wait, own in zip(waits_s, own_s, strict=True)
    )
    again_s = max(_MIN_RETRY_S, over_limit_s, over_deadline_s)
    return Refusal(reason, wait_s, again_s if again_s < math.inf else 0.0)


def _finite(seconds: float) -> float:
    return seconds if 0.0 < seconds < math.inf else 0.0
