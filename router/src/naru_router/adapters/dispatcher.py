"""A request's life between the edges and the workers: choose, send, take the deltas, try elsewhere once.

HTTP and gRPC hand it jobs and consumers; it decides nothing itself: `core.holding` picks, `core.retry` judges. Where no
worker has the model ready, the request waits on a worker that knows it; it waits here only while none does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import NaruError, Unavailable
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.fleet import Fleet, Incarnation, Survey
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.ticket import Ticket, check_deltas
from naru_router.adapters.worker_link import WorkerLink
from naru_router.core.errors import with_eta
from naru_router.core.holding import Placement, RingSettings, place
from naru_router.core.retry import AttemptFailed, decide_retry
from naru_router.core.routing import Decision
from naru_router.core.waiting import Seat, WaitingRoom

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""What a worker does not know is believed for a while, whose end announces nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one model."""

    model: str
    """The model's own name."""
    request: worker_pb2.GenerateRequest
    """Without a request id. Never changed after it is built."""
    key: bytes
    """See core.routing.RouteRequest."""
    n: int
    is_knock: bool = False
    """Only brings the model up: not sent to a worker that has it ready."""


class Consumer(Protocol):
    """Takes the output of one job."""

    @property
    def has_sent(self) -> bool:
        """Whether the client has seen a byte of it."""

    def begin(self, decision: Decision) -> None:
        """A new attempt starts; output of an earlier one is void."""

    async def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes checked deltas."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How requests are placed, and how they wait."""

    model_wait_s: float
    ring: RingSettings
    max_waiting_per_model: int


@dataclass(slots=True)
class _Course:
    """Where a request stands between its attempts. Mutable."""

    seat: Seat
    deadline_s: float
    """Until when it may wait for its model."""
    num_attempts: int = 0
    excluded: frozenset[Incarnation] = frozenset()
    last_error: NaruError | None = None
    """Of the last attempt, told where no other worker can be had."""
    may_raise: bool = True
    """Whether a worker may be asked to load the model for it."""


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
        self.waiting = WaitingRoom(settings.max_waiting_per_model)
        self._shutdown: Unavailable | None = None

    async def run(self, job: Job, consumer: Consumer) -> None:
        """Runs a job to its end; a cancelled caller cancels it on the worker.

        Raises:
            NaruError: it failed, and was not or could not be served elsewhere.
        """
        with self.waiting.seat(job.model) as seat:
            await self._run(job, consumer, seat)

    async def bring_up(self, model: str) -> None:
        """Returns when some worker has had the model ready; one is asked to load it where none has.

        Takes no seat: it waits for others, who have one each.

        Raises:
            NaruError: it could not be loaded, or not in time.
        """
        sampling = inference_pb2.SamplingParams(max_tokens=0)
        request = worker_pb2.GenerateRequest(model=model, sampling=sampling, skip_prefix_cache=True)
        request.token_ids.ids.append(0)  # in every vocabulary
        job = Job(model, request, b"", n=1, is_knock=True)
        await self._run(job, _Silent(), WaitingRoom(max_per_model=1).seat(model))

    def shut_down(self) -> None:
        """Ends every job, running or waiting, with an error."""
        self._shutdown = Unavailable("the router is shutting down; send the request again")
        self._fleet.fail_all(self._shutdown)

    async def _run(self, job: Job, consumer: Consumer, seat: Seat) -> None:
        course = _Course(seat, time.monotonic() + self._settings.model_wait_s)
        try:
            while not await self._try(job, consumer, course):
                pass
        except Unavailable as error:
            timed = error if error is self._shutdown else with_eta(error, self._fleet.route_map.eta_s(job.model))
            if timed is error:
                raise
            raise timed from error

    async def _try(self, job: Job, consumer: Consumer, course: _Course) -> bool:
        """One attempt; False: another one is due."""
        placement = await self._choose(job, course)
        if job.is_knock and not placement.is_held:
            return True
        link, incarnation = self._fleet.link(placement.decision.worker_id)
        try:
            await self._attempt(job, link, placement, consumer, course)
            return True
        except AttemptFailed as failed:
            if failed.is_not_loaded:
                self._fleet.mark_not_loaded(incarnation, job.model)
                self._refresh()
                if placement.is_held and not consumer.has_sent:
                    return False  # it was a question more than an attempt
            course.num_attempts += 1
            verdict = decide_retry(
                failed, num_attempts=course.num_attempts, has_sent=consumer.has_sent, was_held=placement.is_held
            )
            if not verdict.is_retry:
                raise verdict.error from failed
            logger.info("trying again elsewhere than on %s: %s", link.worker_id, failed.error.message)
            self._metrics.retries.labels(verdict.reason).inc()
            course.excluded |= {incarnation}
            course.last_error, course.may_raise = verdict.error, verdict.may_raise
            course.deadline_s = time.monotonic() + self._settings.model_wait_s
            return False

    async def _choose(self, job: Job, course: _Course) -> Placement:
        while True:
            if self._shutdown is not None:
                raise self._shutdown
            survey = self._fleet.survey(job.model, course.excluded)
            placement = place(survey.candidates, job.model, job.key, self._settings.ring, may_raise=course.may_raise)
            remaining_s = course.deadline_s - time.monotonic()
            if placement is not None and (remaining_s > 0 or not placement.is_held):
                self._metrics.bound_skips.inc(placement.decision.num_skipped)
                return placement
            # Who failed once asks no worker to wait for: the error it has says more.
            may_come = survey.num_pending or (survey.num_unaware and course.last_error is None)
            if not may_come or remaining_s <= 0:
                raise course.last_error or _unavailable(job.model, survey, remaining_s)
            course.seat.take()
            await self._fleet.changed(min(remaining_s, _LOOK_AGAIN_S))

    async def _attempt(
        self, job: Job, link: WorkerLink, placement: Placement, consumer: Consumer, course: _Course
    ) -> None:
        if placement.is_held:
            course.seat.take()
        consumer.begin(placement.decision)
        ticket = link.submit(job.request)
        try:
            if placement.is_held:
                with self._fleet.holding(link.worker_id, job.model):
                    await self._started(ticket, job.model, link.worker_id, course.deadline_s)
            course.seat.leave()
            await _pump(ticket, job.n, consumer)
        finally:
            link.release(ticket)

    async def _started(self, ticket: Ticket, model: str, worker_id: str, deadline_s: float) -> None:
        """Returns when the worker has said something of a request that it holds, or has had its model in time."""
        while not await ticket.arrived(max(0.0, deadline_s - time.monotonic())):
            if self._fleet.is_ready(worker_id, model):
                return
            raise _still_loading(model)


class _Silent:
    """Takes what a knock brings: nothing."""

    has_sent = False

    def begin(self, decision: Decision) -> None:
        """Nothing to start."""

    async def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Nothing to keep."""


def _unavailable(model: str, survey: Survey, remaining_s: float) -> Unavailable:
    if survey.failures:
        return Unavailable(f"the model {model!r} failed to load; {'; '.join(survey.failures)}")
    if survey.num_unaware and not (survey.num_pending or survey.candidates):
        return Unavailable(f"no worker knows the model {model!r} yet; send the request again")
    if remaining_s <= 0:
        return _still_loading(model)
    return Unavailable(f"no worker holds the model {model!r} now; send the request again")


def _still_loading(model: str) -> Unavailable:
    return Unavailable(f"the model {model!r} is still loading; send the request again")


async def _pump(ticket: Ticket, n: int, consumer: Consumer) -> None:
    while True:
        deltas = await ticket.take()
        check_deltas(deltas, n)
        await consumer.feed(deltas)
        if deltas[-1].request_done:
            return
