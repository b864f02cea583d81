"""A request's life between the edges and the workers: choose, send, take the deltas, try elsewhere.

HTTP and gRPC hand it jobs and consumers; it decides nothing itself: the chooser says where to, the retries what becomes
of an attempt that failed. Where a worker is lost in the middle of an answer, another one goes on from what
`core.transcript` has of it. Where a model cannot be served at all, those that stand in for it are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable

from naru_proto.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LoadError,
    NaruError,
    Overloaded,
    QuotaExceeded,
    Unavailable,
)
from naru_proto.names import base_name
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.admission import Admission
from naru_router.adapters.attempt import SERVED, Attempt
from naru_router.adapters.chooser import LOOK_AGAIN_S, Chooser, DispatchSettings
from naru_router.adapters.course import Consumer, Course, Job, SilentConsumer
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.lessons import Lessons
from naru_router.adapters.load_desk import LoadDesk
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.pump import pump
from naru_router.adapters.retries import Retries
from naru_router.adapters.tenancy.quota_keeper import QuotaTicket
from naru_router.adapters.tenancy.tenancy import Tenancy
from naru_router.adapters.ticket import Ticket
from naru_router.core.errors import with_eta
from naru_router.core.retry import AttemptFailed
from naru_router.core.route_map import Service
from naru_router.core.tenancy.cost import expected_tokens
from naru_router.core.token_sizes import TokenSizes
from naru_router.core.traces import RequestTrace, Traces
from naru_router.core.transcript import Transcript
from naru_router.core.waiting import Seat, WaitingRoom, still_loading

logger = logging.getLogger(__name__)

DEADLINE_GRACE_S = 1.0
"""For the worker's own word that the time is over."""


class Dispatcher:
    """Runs jobs on the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        desk: LoadDesk,
        tenancy: Tenancy,
        settings: DispatchSettings,
        metrics: Metrics,
        *,
        sizes: TokenSizes,
        traces: Traces,
        refresh: Callable[[], None],
    ) -> None:
        """`refresh` asks for a new reading of the route map."""
        self._fleet = fleet
        self._tenancy = tenancy
        self._settings = settings
        self._metrics = metrics
        self._traces = traces
        self._chooser = Chooser(fleet, desk, settings, metrics)
        self._retries = Retries(fleet, metrics, refresh)
        self._lessons = Lessons(sizes, metrics)
        self.times = self._chooser.times
        self.look = self._chooser.look
        self.waiting = WaitingRoom(self._show_waiting)
        self._shutdown: Unavailable | None = None

    async def run(self, job: Job, consumer: Consumer, admission: Admission | None = None) -> None:
        """Runs a job to its end; a cancelled caller cancels it on the worker.

        Args:
            job: what to run.
            consumer: takes its output.
            admission: of the request that it is a part of; None: it is all of it.

        Raises:
            NaruError: it failed, and was not or could not be served elsewhere.
        """
        trace = _trace(job)
        self._traces.keep(trace)
        outcome = "failed: the router's log says why"
        try:
            # Nobody in particular has no quota.
            if job.caller.tenant:
                await self._serve_admitted(job, consumer, trace, admission)
            else:
                await self._serve(job, consumer, trace)
            outcome = SERVED
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except NaruError as error:
            outcome = f"{error.code}: {error.message}"
            raise
        finally:
            trace.end(outcome, time.monotonic())

    def seat(self, model: str, max_depth: int = 0) -> Seat:
        """A place among those that wait for a model; `max_depth` 0: as many as the router's own limit says."""
        depth = max_depth or self._settings.limits.max_depth
        return self.waiting.seat(base_name(model), depth, lambda: self.times.left(model).retry_after_s)

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
        with contextlib.suppress(InvalidRequest):  # a model that generates nothing: it says so once it is loaded
            await self._run(job, SilentConsumer(), WaitingRoom().seat(model, max_depth=1), None)

    def shut_down(self) -> None:
        """Ends every job, running or waiting, with an error."""
        self._shutdown = Unavailable("the router is shutting down; send the request again")
        self._fleet.fail_all(self._shutdown)

    def has_moved(self, job: Job) -> bool:
        """Whether another model serves the name that was asked for by now."""
        return job.remake is not None and self._fleet.route_map.has_moved(job.name, job.model)

    async def _serve_admitted(
        self, job: Job, consumer: Consumer, trace: RequestTrace, admission: Admission | None
    ) -> None:
        """Takes the request from its tenant's quota, once, on whichever models it ends."""
        if admission is None:
            with Admission(tokens_of(job)) as whole:
                await self._serve_admitted(job, consumer, trace, whole)
            return
        await admission.take(functools.partial(self._admit, job))
        try:
            await self._serve(job, consumer, trace)
        finally:
            admission.add_use(trace.num_tokens_used)

    async def _admit(self, job: Job, num_tokens: int) -> QuotaTicket:
        try:
            return await self._tenancy.admit(job.caller, num_tokens)
        except QuotaExceeded:
            self._metrics.refused.labels(job.label, "quota").inc()
            raise

    # --- the models that may serve it -------------------------------------------------------------------------------

    async def _serve(self, job: Job, consumer: Consumer, trace: RequestTrace) -> None:
        """Runs the job, or the same on those models that stand in for its own where that cannot be served.

        Raises:
            NaruError: of the model that was asked for, but where another one had begun to answer.
        """
        try:
            with self.seat(job.model, job.max_depth) as seat:
                await self._run(job, consumer, seat, trace)
        except NaruError as error:
            if consumer.has_sent or not self._may_stand_in(job, error):
                raise
            if not await self._serve_in_its_place(job, consumer, trace, error):
                if job.first_error is not None:
                    raise job.first_error from error
                raise
        else:
            self._count_stand_in(job)

    async def _serve_in_its_place(self, job: Job, consumer: Consumer, trace: RequestTrace, error: NaruError) -> bool:
        """Whether one that stands in has served it. What is wrong with those alone is not told: none was asked for."""
        for other in self._stand_ins(job):
            assert job.remake is not None  # or there were none
            logger.info("asking %s in place of %s: %s", other.entry.name, job.label, error.message)
            try:
                stand_in = await job.remake(other)
                with self.seat(stand_in.model, stand_in.max_depth) as seat:
                    await self._run(stand_in, consumer, seat, trace)
            except NaruError as failed:
                if consumer.has_sent or self._is_over(failed):
                    raise
                logger.info("%s cannot stand in: %s", other.entry.name, failed.message)
            else:
                self._count_stand_in(stand_in)
                return True
        return False

    def _may_stand_in(self, job: Job, error: NaruError) -> bool:
        """Whether no copy of the job's model can be had, so that another model may be asked."""
        if self._is_over(error):
            return False
        if job.first_error is not None:
            return True  # it stands in itself, and whatever is wrong with it the next one may do
        if isinstance(error, Overloaded):  # too many wait for a copy, or the copies are busy
            return not self._fleet.ready(job.model)
        return isinstance(error, (Unavailable, LoadError))

    def _is_over(self, error: NaruError) -> bool:
        """Whether nobody waits for an answer any more, or nobody may give one."""
        return error is self._shutdown or isinstance(error, (Cancelled, DeadlineExceeded))

    def _stand_ins(self, job: Job) -> list[Service]:
        if job.remake is None or job.service is None:
            return []
        return self._fleet.route_map.fallbacks_of(job.service, job.caller)

    def _count_stand_in(self, job: Job) -> None:
        service = job.service
        if service is not None and service.is_stand_in:
            self._metrics.fallbacks.labels((service.asked or service.entry).name).inc()

    # --- one model --------------------------------------------------------------------------------------------------

    async def _run(self, job: Job, consumer: Consumer, seat: Seat, trace: RequestTrace | None) -> None:
        max_wait_s = job.max_wait_s or self._settings.limits.max_wait_s
        until_s = min(time.monotonic() + max_wait_s, job.deadline_s)
        course = Course(seat, max_wait_s, until_s, Transcript(job.n), trace=trace)
        self._retries.on_request(job)
        try:
            if math.isinf(job.deadline_s):
                await self._try_until_done(job, consumer, course)
            else:
                async with _within(job.deadline_s):
                    await self._try_until_done(job, consumer, course)
        except (Unavailable, Overloaded) as error:
            told = self._told(error, job)
            if told is error:
                raise
            raise told from error
        finally:
            if trace is not None:
                trace.num_tokens_used += course.transcript.num_tokens_used(job.num_tokens)

    def _told(self, error: NaruError, job: Job) -> NaruError:
        """What the client hears of a job that was not served in time."""
        if error is self._shutdown:
            return error
        if time.monotonic() >= job.deadline_s:
            return DeadlineExceeded(f"the time that the request was given is over; {error.message}")
        return with_eta(error, self.times.left(job.model).retry_after_s)

    async def _try_until_done(self, job: Job, consumer: Consumer, course: Course) -> None:
        while not await self._try(job, consumer, course):
            if job.remake is not None and not _is_begun(course, consumer) and self.has_moved(job):
                job = await job.remake(None)

    async def _try(self, job: Job, consumer: Consumer, course: Course) -> bool:
        """One attempt; False: another one is due."""
        is_bound = _is_begun(course, consumer)

        def stop() -> bool:
            if self._shutdown is not None:
                raise self._shutdown
            return not is_bound and self.has_moved(job)

        placement = await self._chooser.choose(job, course, stop, is_bound=is_bound)
        if placement is None:
            return False
        if self._shutdown is not None:
            raise self._shutdown  # it came while the chooser waited, and would not reach what is sent now
        if job.is_knock and not placement.is_held:
            return True
        attempt = Attempt(self._fleet, job, placement)
        try:
            return await self._attempt(job, attempt, consumer, course)
        except AttemptFailed as failed:
            attempt.failed(failed)
            self._retries.judge(job, failed, course, attempt, has_sent=consumer.has_sent)
            return False
        finally:
            attempt.end()

    async def _attempt(self, job: Job, attempt: Attempt, consumer: Consumer, course: Course) -> bool:
        """One request on one worker; False: it was given up, as another model serves the name by now."""
        if attempt.is_held:
            course.seat.take()
        decision = attempt.placement.decision
        expected: int | None = None
        request = job.request
        if course.goes_on:
            request = course.transcript.request_from_here(request)
        else:
            if course.has_begun:
                course.transcript = Transcript(job.n)
            course.has_begun = True
            consumer.begin(decision, "" if job.service is None else job.service.answers_as)
            expected = None if attempt.is_held else decision.expected_cached_tokens
        remaining_s = job.deadline_s - time.monotonic()
        ticket = attempt.send(request, 0.0 if math.isinf(remaining_s) else max(0.001, remaining_s), course.trace)
        worker_id, transcript = decision.worker_id, course.transcript
        if attempt.is_held:
            with self._fleet.holding(worker_id, job.model):
                if not await self._started(ticket, job, worker_id, course):
                    return False
        course.seat.leave()
        if course.goes_on:
            self._metrics.continuations.inc()
        await pump(ticket, job.n, consumer, transcript, lambda: attempt.first_output(transcript.cached_tokens))
        attempt.outcome = SERVED
        self._lessons.take(job, transcript, expected)
        return True

    async def _started(self, ticket: Ticket, job: Job, worker_id: str, course: Course) -> bool:
        """True when the worker has said something of a request that it holds, or has had its model in time."""
        while True:
            remaining_s = max(0.0, course.deadline_s - time.monotonic())
            if await ticket.arrived(min(remaining_s, LOOK_AGAIN_S)):
                return True
            if not course.goes_on and self.has_moved(job):
                return False
            if remaining_s > LOOK_AGAIN_S:
                continue
            if self._fleet.is_ready(worker_id, job.model):
                return True
            raise still_loading(job.label, self.times.left(job.model))

    def _show_waiting(self, model: str, count: int) -> None:
        if count:
            self._metrics.waiting.labels(model).set(count)
        else:
            self._metrics.waiting.remove(model)


@contextlib.asynccontextmanager
async def _within(deadline_s: float) -> AsyncIterator[None]:
    """Ends what runs past a deadline of the monotonic clock, where the worker has not.

    Raises:
        DeadlineExceeded: it did.
    """
    rest_s = max(0.0, deadline_s - time.monotonic())
    try:
        async with asyncio.timeout(rest_s + DEADLINE_GRACE_S):
            yield
    except TimeoutError as exc:
        raise DeadlineExceeded("the time that the request was given is over; give it more, or ask for less") from exc


def _is_begun(course: Course, consumer: Consumer) -> bool:
    return course.goes_on or consumer.has_sent


def _trace(job: Job) -> RequestTrace:
    return RequestTrace(
        request_id=job.request_id,
        tenant=job.caller.tenant,
        model=job.label,
        num_tokens=job.num_tokens,
        num_keys=len(job.route_keys),
        priority=job.priority,
        began_s=time.monotonic(),
    )


def tokens_of(job: Job) -> int:
    """What a job may cost of a quota."""
    has_answer = job.request.WhichOneof("task") is None
    return expected_tokens(job.num_tokens, job.request.sampling, has_answer=has_answer)
