"""A request's life between the edges and the workers: choose, send, take the deltas, try elsewhere once.

HTTP and gRPC hand it jobs and consumers; it decides nothing itself: `core.routing` picks, `core.retry` judges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import Unavailable
from naru_proto.v1 import worker_pb2
from naru_router.adapters.fleet import Fleet, Incarnation
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.ticket import Ticket, check_deltas
from naru_router.adapters.worker_link import WorkerLink
from naru_router.core.retry import AttemptFailed, decide_retry
from naru_router.core.routing import Candidate, Decision, RouteRequest, route

logger = logging.getLogger(__name__)


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
    """How requests are placed."""

    model_wait_s: float
    load_factor: float
    num_virtual_nodes: int


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
        self._shutdown: Unavailable | None = None

    async def wait_ready(self, model: str) -> None:
        """Returns when some worker can serve the model.

        Raises:
            Unavailable: none can, or not within the time a request may wait.
        """
        await self._choose(model, b"", frozenset(), None)

    async def run(self, job: Job, consumer: Consumer) -> None:
        """Runs a job to its end; a cancelled caller cancels it on the worker.

        Raises:
            NaruError: it failed, and was not or could not be served elsewhere.
        """
        excluded: frozenset[Incarnation] = frozenset()
        last: AttemptFailed | None = None
        num_attempts = 0
        while True:
            decision = await self._choose(job.model, job.key, excluded, last)
            link, incarnation = self._fleet.link(decision.worker_id)
            num_attempts += 1
            try:
                await self._attempt(job, link, decision, consumer)
                return
            except AttemptFailed as failed:
                verdict = decide_retry(failed, num_attempts=num_attempts, has_sent=consumer.has_sent)
                if failed.is_not_loaded:
                    self._fleet.mark_not_loaded(incarnation, job.model)
                    self._refresh()
                if not verdict.is_retry:
                    raise verdict.error from failed
                logger.info("trying again elsewhere than on %s: %s", decision.worker_id, failed.error.message)
                self._metrics.retries.labels(verdict.reason).inc()
                excluded |= {incarnation}
                last = AttemptFailed(verdict.error, failed.kind, is_retryable=True)

    def shut_down(self) -> None:
        """Ends every job, running or waiting, with an error."""
        self._shutdown = Unavailable("the router is shutting down; send the request again")
        self._fleet.fail_all(self._shutdown)

    async def _choose(
        self, model: str, key: bytes, excluded: frozenset[Incarnation], last: AttemptFailed | None
    ) -> Decision:
        deadline_s = time.monotonic() + self._settings.model_wait_s
        while True:
            if self._shutdown is not None:
                raise self._shutdown
            survey = self._fleet.survey(model, excluded)
            if survey.candidates:
                return self._route(survey.candidates, key)
            remaining_s = deadline_s - time.monotonic()
            if survey.num_pending == 0 or remaining_s <= 0:
                raise last.error if last is not None else self._unavailable(model, survey.failures, remaining_s)
            await self._fleet.changed(remaining_s)

    def _route(self, candidates: Sequence[Candidate], key: bytes) -> Decision:
        decision = route(
            candidates,
            RouteRequest(key),
            load_factor=self._settings.load_factor,
            num_virtual_nodes=self._settings.num_virtual_nodes,
        )
        self._metrics.bound_skips.inc(decision.num_skipped)
        return decision

    async def _attempt(self, job: Job, link: WorkerLink, decision: Decision, consumer: Consumer) -> None:
        consumer.begin(decision)
        ticket = link.submit(job.request)
        try:
            await _pump(ticket, job.n, consumer)
        finally:
            link.release(ticket)

    def _unavailable(self, model: str, failures: Sequence[str], remaining_s: float) -> Unavailable:
        if remaining_s <= 0:
            return Unavailable(f"the model {model!r} is still loading; send the request again")
        if failures:
            return Unavailable(f"the model {model!r} failed to load; {'; '.join(failures)}")
        return Unavailable(f"no worker holds the model {model!r} now; send the request again")


async def _pump(ticket: Ticket, n: int, consumer: Consumer) -> None:
    while True:
        deltas = await ticket.take()
        check_deltas(deltas, n)
        await consumer.feed(deltas)
        if deltas[-1].request_done:
            return
