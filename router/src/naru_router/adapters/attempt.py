"""One try of a job on one worker, and all who are told of it: the worker's health, the news, the trace.

Made by the dispatcher once a worker is chosen, and ended by it once, whatever came of it. Chooses and retries nothing.
"""

from __future__ import annotations

from naru_proto.v1 import worker_pb2
from naru_router.adapters.course import Job
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.ticket import Ticket
from naru_router.core.holding import Placement
from naru_router.core.retry import AttemptFailed
from naru_router.core.tenant_queues import Place
from naru_router.core.traces import AttemptTrace, RequestTrace

SERVED = "served"
GIVEN_UP = "given up"
_ANSWERING = "answering"


class Attempt:
    """Mutable."""

    __slots__ = (
        "_fleet",
        "_job",
        "_place",
        "_sending",
        "_ticket",
        "_trace",
        "_uncached_tokens",
        "incarnation",
        "is_held",
        "life",
        "link",
        "outcome",
        "placement",
    )

    def __init__(self, fleet: Fleet, job: Job, placement: Placement) -> None:
        """`placement`: on a worker that has a link at this instant."""
        decision = placement.decision
        self._fleet = fleet
        self._job = job
        self.placement = placement
        self.is_held = placement.is_held
        self.link, self.incarnation = fleet.link(decision.worker_id)
        self.life = self.link.life
        """Of the worker's stream, so that all which one break ends counts once."""
        self.outcome = GIVEN_UP
        """For the trace, as long as nobody knows better."""
        self._uncached_tokens = max(0, job.num_tokens - decision.expected_cached_tokens)
        self._sending = fleet.health.sent(
            self.incarnation, job.model, self._uncached_tokens, None if placement.is_held else decision.expected_s
        )
        self._ticket: Ticket | None = None
        self._trace: AttemptTrace | None = None
        self._place: Place | None = None

    def send(self, request: worker_pb2.GenerateRequest, timeout_s: float, trace: RequestTrace | None) -> Ticket:
        """Sends the request; once.

        Raises:
            AttemptFailed: the worker's stream is down.
        """
        link, job, fleet = self.link, self._job, self._fleet
        ticket = self._ticket = link.submit(request, timeout_s)
        fleet.news.sent(link.worker_id, ticket.request_id, job.model, self._uncached_tokens)
        fleet.pending.add(ticket.request_id, link.worker_id, job.route_keys)
        if job.caller.tenant:
            caller, tokens = job.caller, self._uncached_tokens
            self._place = fleet.queues.enter(job.model, caller.tenant, caller.weight, tokens)
        if trace is not None:
            sent_s = self._sending.sent_s  # first output is counted from then, too
            self._trace = trace.add(self.placement.decision, is_held=self.is_held, now_s=sent_s, model=job.label)
        return ticket

    def first_output(self, cached_tokens: int) -> None:
        """The first output has come; once."""
        self._settle()
        took_s = self._sending.first_output()
        if self._trace is not None:
            self._trace.first_s = self._trace.at_s + took_s
            self._trace.cached_tokens = cached_tokens
            self._trace.outcome = _ANSWERING

    def failed(self, failed: AttemptFailed) -> None:
        """The worker failed it."""
        self.outcome = f"{failed.kind.value}: {failed.error.message}"
        self._sending.failed(failed, self.life)

    def end(self) -> None:
        """It is over: nothing of it is counted from now on, and a worker that is still at it hears that it may stop."""
        if self._ticket is not None:
            self.link.release(self._ticket)
            self._settle()
        self._sending.ended()
        if self._trace is not None:
            self._trace.end(self.outcome)

    def _settle(self) -> None:
        if self._ticket is not None:
            request_id = self._ticket.request_id
            self._fleet.news.settled(self.link.worker_id, request_id)
            self._fleet.pending.remove(request_id, self._job.route_keys)
        if self._place is not None:
            self._fleet.queues.leave(self._place)
