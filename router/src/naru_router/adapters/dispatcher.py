"""A request's life between the edges and the workers: choose, send, take the deltas, try elsewhere once.

HTTP and gRPC hand it jobs and consumers; it decides nothing itself: `core.holding` picks, `core.retry` judges. Where no
worker has the model ready, the request waits on a worker that knows it; it waits here only while none does. Where a
worker is lost in the middle of an answer, another one goes on from what `core.transcript` has of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from naru_proto.errors import Unavailable
from naru_proto.names import base_name
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.course import Consumer, Course, Job, SilentConsumer
from naru_router.adapters.fleet import Fleet, Incarnation, Survey
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.ticket import Ticket, check_deltas
from naru_router.adapters.worker_link import WorkerLink
from naru_router.core.errors import with_eta
from naru_router.core.holding import Placement, RingSettings, place
from naru_router.core.retry import AttemptFailed, FailureKind, decide_retry
from naru_router.core.transcript import Transcript
from naru_router.core.waiting import Seat, WaitingRoom, WaitLimits

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""What a worker does not know is believed for a while, whose end announces nothing; nor does a target that moves."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How requests are placed, and how they wait."""

    limits: WaitLimits
    ring: RingSettings


class Dispatcher:
    """Runs jobs on the fleet."""

    def __init__(
        self, fleet: Fleet, settings: DispatchSettings, metrics: Metrics, *, refresh: Callable[[], None]
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._metrics = metrics
        self._refresh = refresh
        """Asks for a new reading of the route map."""
        self.waiting = WaitingRoom()
        self._shutdown: Unavailable | None = None

    async def run(self, job: Job, consumer: Consumer) -> None:
        """Runs a job to its end; a cancelled caller cancels it on the worker.

        Raises:
            NaruError: it failed, and was not or could not be served elsewhere.
        """
        with self.seat(job.model, job.max_depth) as seat:
            await self._run(job, consumer, seat)

    def seat(self, model: str, max_depth: int = 0) -> Seat:
        """A place among those that wait for a model; `max_depth` 0: as many as the router's own limit says."""
        return self.waiting.seat(base_name(model), max_depth or self._settings.limits.max_depth)

    async def bring_up(self, model: str, max_wait_s: float = 0.0) -> None:
        """Returns when some worker has had the model ready; one is asked to load it where none has.

        Takes no seat: it waits for others, who have one each.

        Raises:
            NaruError: it could not be loaded, or not in time.
        """
        sampling = inference_pb2.SamplingParams(max_tokens=0)
        request = worker_pb2.GenerateRequest(model=model, sampling=sampling, skip_prefix_cache=True)
        request.token_ids.ids.append(0)  # in every vocabulary
        job = Job(model, request, b"", n=1, max_wait_s=max_wait_s, is_knock=True)
        await self._run(job, SilentConsumer(), WaitingRoom().seat(model, max_depth=1))

    def shut_down(self) -> None:
        """Ends every job, running or waiting, with an error."""
        self._shutdown = Unavailable("the router is shutting down; send the request again")
        self._fleet.fail_all(self._shutdown)

    def has_moved(self, job: Job) -> bool:
        """Whether another model serves the name that was asked for by now."""
        return job.remake is not None and self._fleet.route_map.has_moved(job.name, job.model)

    async def _run(self, job: Job, consumer: Consumer, seat: Seat) -> None:
        max_wait_s = job.max_wait_s or self._settings.limits.max_wait_s
        course = Course(seat, max_wait_s, time.monotonic() + max_wait_s, Transcript(job.n))
        try:
            while not await self._try(job, consumer, course):
                if job.remake is not None and not _is_begun(course, consumer) and self.has_moved(job):
                    job = await job.remake()
        except Unavailable as error:
            timed = error if error is self._shutdown else with_eta(error, self._fleet.route_map.eta_s(job.model))
            if timed is error:
                raise
            raise timed from error

    async def _try(self, job: Job, consumer: Consumer, course: Course) -> bool:
        """One attempt; False: another one is due."""
        placement = await self._choose(job, course, is_bound=_is_begun(course, consumer))
        if placement is None:
            return False
        if job.is_knock and not placement.is_held:
            return True
        link, incarnation = self._fleet.link(placement.decision.worker_id)
        life = link.life
        try:
            return await self._attempt(job, link, placement, consumer, course)
        except AttemptFailed as failed:
            self._judge(job, failed, course, placement, (incarnation, life), has_sent=consumer.has_sent)
            return False

    def _judge(
        self,
        job: Job,
        failed: AttemptFailed,
        course: Course,
        placement: Placement,
        where: tuple[Incarnation, object],
        *,
        has_sent: bool,
    ) -> None:
        """Prepares the next attempt.

        Raises:
            NaruError: none is due.
        """
        incarnation, life = where
        if failed.is_not_loaded:
            self._fleet.mark_not_loaded(incarnation, job.model)
            self._refresh()
        verdict = decide_retry(
            failed,
            num_attempts=course.num_attempts + 1,
            has_sent=has_sent,
            can_go_on=course.transcript.can_go_on,
            was_held=placement.is_held,
        )
        if not verdict.is_retry:
            raise verdict.error from failed
        if not verdict.counts:
            if not placement.is_held:
                self._metrics.retries.labels(verdict.reason).inc()
            return
        logger.info("trying again elsewhere than on %s: %s", incarnation[0], failed.error.message)
        self._metrics.retries.labels(verdict.reason).inc()
        course.num_attempts += 1
        course.excluded |= {incarnation}
        course.goes_on = course.transcript.can_go_on
        has_broken = failed.kind is FailureKind.STREAM_LOST
        # An answer that is cut short by an orderly end (a drain that took too long) was lost with its worker as well.
        course.is_lost = has_broken or (course.goes_on and isinstance(failed.error, Unavailable))
        if has_broken:
            course.lost[incarnation] = life
        course.last_error, course.may_raise = verdict.error, verdict.may_raise
        course.deadline_s = time.monotonic() + course.max_wait_s

    async def _choose(self, job: Job, course: Course, *, is_bound: bool) -> Placement | None:
        """Where the job goes next, after waiting where it must; None: it is another model's by now.

        Args:
            job: what to place.
            course: mutated: it takes its seat when it has to wait.
            is_bound: no other model may serve it any more.
        """
        while True:
            if self._shutdown is not None:
                raise self._shutdown
            if not is_bound and self.has_moved(job):
                return None
            survey, placement = self._look(job, course)
            remaining_s = course.deadline_s - time.monotonic()
            if placement is not None and (remaining_s > 0 or not placement.is_held):
                self._metrics.bound_skips.inc(placement.decision.num_skipped)
                return placement
            if not _may_come(survey, course) or remaining_s <= 0:
                raise course.last_error or _unavailable(job.label, survey, remaining_s)
            course.seat.take()
            await self._fleet.changed(min(remaining_s, _LOOK_AGAIN_S))

    def _look(self, job: Job, course: Course) -> tuple[Survey, Placement | None]:
        """Who can serve the job now. Who lost its stream is asked again where nobody else can, once it is back."""
        excluded = course.excluded
        survey = self._fleet.survey(job.model, excluded)
        placement = place(survey.candidates, job.model, job.key, self._settings.ring, may_raise=course.may_raise)
        returned = {incarnation for incarnation, life in course.lost.items() if self._fleet.is_back(incarnation, life)}
        if placement is None and returned:
            survey = self._fleet.survey(job.model, excluded - returned)
            placement = place(survey.candidates, job.model, job.key, self._settings.ring, may_raise=course.may_raise)
        return survey, placement

    async def _attempt(
        self, job: Job, link: WorkerLink, placement: Placement, consumer: Consumer, course: Course
    ) -> bool:
        """One request on one worker; False: it was given up, as another model serves the name by now."""
        if placement.is_held:
            course.seat.take()
        request = job.request
        if course.goes_on:
            request = course.transcript.request_from_here(request)
        else:
            course.transcript = Transcript(job.n)
            consumer.begin(placement.decision)
        ticket = link.submit(request)
        try:
            if placement.is_held:
                with self._fleet.holding(link.worker_id, job.model):
                    if not await self._started(ticket, job, link.worker_id, course):
                        return False
            course.seat.leave()
            if course.goes_on:
                self._metrics.continuations.inc()
            await _pump(ticket, job.n, consumer, course.transcript)
            return True
        finally:
            link.release(ticket)

    async def _started(self, ticket: Ticket, job: Job, worker_id: str, course: Course) -> bool:
        """True when the worker has said something of a request that it holds, or has had its model in time."""
        while True:
            remaining_s = max(0.0, course.deadline_s - time.monotonic())
            if await ticket.arrived(min(remaining_s, _LOOK_AGAIN_S)):
                return True
            if not course.goes_on and self.has_moved(job):
                return False
            if remaining_s > _LOOK_AGAIN_S:
                continue
            if self._fleet.is_ready(worker_id, job.model):
                return True
            raise _still_loading(job.label)


def _is_begun(course: Course, consumer: Consumer) -> bool:
    return course.goes_on or consumer.has_sent


def _may_come(survey: Survey, course: Course) -> bool:
    """Whether it is worth to wait for a worker: the control plane is to bring one while the registry has the model.

    Who failed once on a worker that lives asks no other to be waited for: the error it has says more.
    """
    if survey.num_pending:
        return True
    return survey.is_known and (course.is_lost or course.last_error is None)


def _unavailable(model: str, survey: Survey, remaining_s: float) -> Unavailable:
    if survey.failures:
        return Unavailable(f"the model {model!r} failed to load; {'; '.join(survey.failures)}")
    is_nowhere = not (survey.num_pending or survey.candidates)
    if is_nowhere and survey.num_unaware:
        return Unavailable(f"no worker knows the model {model!r} yet; send the request again")
    if remaining_s <= 0 and not is_nowhere:
        return _still_loading(model)
    return Unavailable(f"no worker holds the model {model!r} now; send the request again")


def _still_loading(model: str) -> Unavailable:
    return Unavailable(f"the model {model!r} is still loading; send the request again")


async def _pump(ticket: Ticket, n: int, consumer: Consumer, transcript: Transcript) -> None:
    while True:
        deltas = await ticket.take()
        check_deltas(deltas, n)
        transcript.add(deltas)
        await consumer.feed(deltas)
        if deltas[-1].request_done:
            return
