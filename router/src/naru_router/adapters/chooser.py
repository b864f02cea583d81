"""Where a job goes next: to a worker that has its model ready, or to one that will, after waiting where it must.

Asked by the dispatcher before each attempt. It decides nothing itself: `core.routing.route` picks among those that are
ready, `core.holding` among the others, the load desk says where a cold model comes up, `core.overload` refuses what
would be too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from naru_proto.errors import Unavailable
from naru_router.adapters.course import Course, Job
from naru_router.adapters.fleet import Fleet, Survey
from naru_router.adapters.fleet_workers import FleetWorkers
from naru_router.adapters.health import Incarnation
from naru_router.adapters.load_desk import LoadDesk
from naru_router.adapters.load_times import LoadTimes
from naru_router.adapters.metrics import Metrics
from naru_router.core.holding import Placement, RingSettings, place, placed_at
from naru_router.core.overload import ShedLimits, admit
from naru_router.core.routing.model import RouteRequest, Strategy, WorkerView
from naru_router.core.routing.route import route
from naru_router.core.waiting import Outlook, WaitLimits, check_hope, unavailable

LOOK_AGAIN_S = 1.0
"""What a worker does not know is believed for a while, whose end announces nothing; nor does a target that moves."""
_NOBODY = Survey((), 0, 0, True, ())
_STRATEGIES = {strategy.value: strategy for strategy in Strategy}
_IN_TURN = Strategy.ROUND_ROBIN.value


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How requests are placed, and how they wait."""

    limits: WaitLimits
    ring: RingSettings
    shed: ShedLimits = ShedLimits()  # noqa: RUF009  (frozen)


class Chooser:
    """Chooses workers for jobs of one router."""

    def __init__(self, fleet: Fleet, desk: LoadDesk, settings: DispatchSettings, metrics: Metrics) -> None:
        self.times = LoadTimes(lambda: fleet.route_map, desk.site)
        self._fleet = fleet
        self._desk = desk
        self._workers = FleetWorkers(fleet)
        self._settings = settings
        self._metrics = metrics
        self._turns: dict[str, int] = {}
        """Requests by model, of those that go in turn."""

    async def choose(self, job: Job, course: Course, stop: Callable[[], bool], *, is_bound: bool) -> Placement | None:
        """Where the job goes next, after waiting where it must; None: it is to be asked again, as something changed.

        Args:
            job: what to place.
            course: mutated: it takes its seat when it has to wait.
            stop: whether to look no further; then None.
            is_bound: it has begun: no other model may serve it, and it is not refused any more.

        Raises:
            Overloaded: it would be too late, or too many wait.
            Unavailable: nobody can serve it, or not in time.
        """
        while not stop():
            placement = self._ready(job, course, is_bound=is_bound)
            survey = _NOBODY
            if placement is None:
                survey, placement = self._held(job, course)
            if placement is not None and placement.is_raising:
                survey, placement = await self._at_its_site(job, course)
            remaining_s = course.deadline_s - time.monotonic()
            if placement is not None and (remaining_s > 0 or not placement.is_held):
                if placement.is_held and not is_bound:
                    check_hope(job.label, self.times.left(job.model), remaining_s)
                if placement.decision.num_skipped:
                    self._metrics.bound_skips.inc(placement.decision.num_skipped)
                return placement
            if not _may_come(survey, course) or remaining_s <= 0:
                raise course.last_error or self._unavailable(job, survey, is_over=remaining_s <= 0)
            course.seat.take()
            await self._fleet.changed(min(remaining_s, LOOK_AGAIN_S))
        return None

    def look(self, job: Job) -> Placement | None:
        """Where the job would go now, were it new; takes nothing. None: nowhere."""
        nobody: frozenset[Incarnation] = frozenset()
        views = self._views(job, nobody)
        if views:
            request = self._request(job, may_probe=False, turn=self._turns.get(job.model, 0))
            return Placement(route(views, request), is_held=False)
        return self._place(job, nobody, may_raise=True)[1]

    def _ready(self, job: Job, course: Course, *, is_bound: bool) -> Placement | None:
        """Among the workers that have the model ready."""
        views = self._views(job, course.excluded)
        if not views:
            return None
        is_first = course.num_attempts == 0
        request = self._request(job, may_probe=is_first, turn=self._turn(job))
        if is_first and not is_bound and not job.is_knock:
            self._judge(job, views, request)
        return Placement(route(views, request), is_held=False)

    def _views(self, job: Job, excluded: frozenset[Incarnation]) -> list[WorkerView]:
        records = self._fleet.ready(job.model, excluded)
        return self._fleet.views(job.model, records) if records else []

    def _judge(self, job: Job, views: list[WorkerView], request: RouteRequest) -> None:
        """Refuses what would be too late.

        Raises:
            NaruError: why.
        """
        has_deadline = job.deadline_s < math.inf
        if not has_deadline and any(_is_idle(view) for view in views):
            return  # whoever has no deadline waits for nobody there: most requests of a fleet that is not busy
        remaining_s = job.deadline_s - time.monotonic() if has_deadline else math.inf
        refusal = admit(
            views,
            request,
            self._settings.shed,
            priority=job.priority,
            remaining_s=remaining_s,
            share=self._share(job, views),
        )
        if refusal is not None:
            self._metrics.refused.labels(job.label, "overload").inc()
            raise refusal.error(job.label)

    def _share(self, job: Job, views: Sequence[WorkerView]) -> float:
        """Which part of the queue its tenant waits for: workers serve tenants by turns."""
        caller = job.caller
        if not caller.tenant:
            return 1.0
        all_tokens = sum(view.waiting_tokens for view in views)
        return self._fleet.queues.share(job.model, caller.tenant, caller.weight, job.num_tokens, all_tokens)

    def _request(self, job: Job, *, may_probe: bool, turn: int) -> RouteRequest:
        entry, ring = None if job.service is None else job.service.entry, self._settings.ring
        strategy, load_factor = Strategy.PREFIX_AFFINITY, ring.load_factor
        if entry is not None:
            strategy = _STRATEGIES.get(entry.strategy, strategy)
            load_factor = entry.load_factor or load_factor
        return RouteRequest(
            job.key,
            job.num_tokens,
            job.key_tokens,
            strategy,
            load_factor,
            ring.num_virtual_nodes,
            self._fleet.seed,
            turn,
            may_probe,
            self._fleet.matches(job.model, job.route_keys),
        )

    def _turn(self, job: Job) -> int:
        """The job's number among those that go in turn."""
        if job.service is None or job.service.entry.strategy != _IN_TURN:
            return 0
        turn = self._turns.get(job.model)
        if turn is None:
            known = self._fleet.route_map.models
            self._turns = {model: it for model, it in self._turns.items() if model in known}
            turn = 0
        self._turns[job.model] = turn + 1
        return turn

    def _held(self, job: Job, course: Course) -> tuple[Survey, Placement | None]:
        """Among those that do not have it ready. Who lost its stream is asked again where nobody else can, once it is
        back.
        """
        survey, placement = self._place(job, course.excluded, may_raise=course.may_raise)
        if placement is not None:
            return survey, placement
        returned = frozenset(
            incarnation for incarnation, life in course.lost.items() if self._fleet.is_back(incarnation, life)
        )
        if returned:
            return self._place(job, course.excluded - returned, may_raise=course.may_raise)
        return survey, None

    def _place(self, job: Job, excluded: frozenset[Incarnation], *, may_raise: bool) -> tuple[Survey, Placement | None]:
        survey = self._fleet.survey(job.model, excluded)
        return survey, place(survey.candidates, job.model, job.key, self._settings.ring, may_raise=may_raise)

    async def _at_its_site(self, job: Job, course: Course) -> tuple[Survey, Placement | None]:
        """Where all routers have a model brought up that nobody has; who has it may be known by then."""
        course.seat.take()
        avoid = frozenset(worker_id for worker_id, _ in course.excluded)
        choose = self._workers.chooser(job.model, course.excluded, self._desk.coming)
        site = None
        with contextlib.suppress(TimeoutError):  # the caller looks at its own deadline
            async with asyncio.timeout(max(0.0, course.deadline_s - time.monotonic())):
                site = await self._desk.where(job.model, choose, avoid)
        survey, placement = self._held(job, course)
        if site is not None and placement is not None and placement.is_raising:
            placement = placed_at(survey.candidates, site.worker_id, site.why)
        return survey, placement

    def _unavailable(self, job: Job, survey: Survey, *, is_over: bool) -> Unavailable:
        outlook = Outlook(survey.num_pending + len(survey.candidates), survey.num_unaware, survey.failures)
        return unavailable(job.label, outlook, self.times.left(job.model), is_over=is_over)


def _is_idle(view: WorkerView) -> bool:
    """Whether nobody waits there, of those whose wait counts (see core.overload)."""
    is_sound = not (view.is_leaving or view.is_suspect or view.is_probe)
    return is_sound and view.waiting_tokens <= 0 and not view.observed_wait_s > 0


def _may_come(survey: Survey, course: Course) -> bool:
    """Whether it is worth to wait for a worker: the control plane is to bring one while the registry has the model.

    Who failed once on a worker that lives asks no other to be waited for: the error it has says more.
    """
    if survey.num_pending:
        return True
    return survey.is_known and (course.is_lost or course.last_error is None)
