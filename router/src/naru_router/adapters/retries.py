"""What becomes of a job whose attempt has failed: `core.retry` judges, this keeps each model's budget and the course.

Asked by the dispatcher after each failed attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from naru_proto.errors import Unavailable
from naru_router.adapters.attempt import Attempt
from naru_router.adapters.course import Course, Job
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.metrics import Metrics
from naru_router.core.retry import AttemptFailed, FailureKind, RetryDecision, decide_retry
from naru_router.core.retry_budget import RetryBudget

logger = logging.getLogger(__name__)


class Retries:
    """Judges for one router."""

    def __init__(self, fleet: Fleet, metrics: Metrics, refresh: Callable[[], None]) -> None:
        """`refresh` asks for a new reading of the route map."""
        self._fleet = fleet
        self._metrics = metrics
        self._refresh = refresh
        self._budgets: dict[str, RetryBudget] = {}

    def on_request(self, job: Job) -> None:
        """A job begins: its model may have a little more tried again."""
        self._budget(job.model).on_request(time.monotonic())

    def judge(self, job: Job, failed: AttemptFailed, course: Course, attempt: Attempt, *, has_sent: bool) -> None:
        """Prepares the next attempt; `has_sent`: the client has seen output.

        Raises:
            NaruError: none is due.
        """
        now_s, budget = time.monotonic(), self._budget(job.model)
        if failed.is_not_loaded:
            self._fleet.mark_not_loaded(attempt.incarnation, job.model)
            self._refresh()
        if failed.is_refusal and course.num_refusals:
            budget.refused_again(now_s)
        verdict = decide_retry(
            failed,
            num_attempts=course.num_attempts + 1,
            has_sent=has_sent,
            can_go_on=course.transcript.can_go_on,
            was_held=attempt.is_held,
            max_retries=1 if job.service is None else job.service.entry.max_retries,
            may_spend=budget.allows(now_s, is_refusal=failed.is_refusal),
            remaining_s=job.deadline_s - now_s,
            num_refusals=course.num_refusals,
            num_losses=course.num_losses,
        )
        if not verdict.is_retry:
            raise verdict.error from failed
        if not verdict.counts:
            if not attempt.is_held:
                self._metrics.retries.labels(verdict.reason).inc()
            return
        if verdict.spends:
            budget.spend(now_s)
        logger.info("trying again elsewhere than on %s: %s", attempt.incarnation[0], failed.error.message)
        self._metrics.retries.labels(verdict.reason).inc()
        _move_on(course, failed, verdict, attempt)
        course.deadline_s = min(now_s + course.max_wait_s, job.deadline_s)

    def _budget(self, model: str) -> RetryBudget:
        """Of a model. Of models that are gone, none is kept."""
        budget = self._budgets.get(model)
        if budget is None:
            known = self._fleet.route_map.models
            self._budgets = {name: it for name, it in self._budgets.items() if name in known}
            budget = self._budgets[model] = RetryBudget()
        return budget


def _move_on(course: Course, failed: AttemptFailed, verdict: RetryDecision, attempt: Attempt) -> None:
    course.num_attempts += 1
    course.num_refusals += failed.is_refusal
    course.num_losses += failed.is_deadly
    course.excluded |= {attempt.incarnation}
    course.goes_on = course.transcript.can_go_on
    has_broken = failed.kind is FailureKind.STREAM_LOST
    # An answer that is cut short by an orderly end (a drain that took too long) was lost with its worker as well.
    course.is_lost = has_broken or (course.goes_on and isinstance(failed.error, Unavailable))
    if has_broken:
        course.lost[attempt.incarnation] = attempt.life
    course.last_error, course.may_raise = verdict.error, verdict.may_raise
