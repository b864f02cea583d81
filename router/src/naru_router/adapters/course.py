"""A job, who takes its output, and where it stands between its attempts. Made by the edges, moved by the dispatcher."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from naru_proto.errors import NaruError
from naru_proto.names import base_name
from naru_proto.v1 import worker_pb2
from naru_router.adapters.health import Incarnation
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.chat_parts import OutputReader
from naru_router.core.route_map import Service
from naru_router.core.routing.model import Decision
from naru_router.core.traces import RequestTrace
from naru_router.core.transcript import Transcript
from naru_router.core.waiting import Seat


@dataclass(slots=True)
class Readers:
    """How a call's output is read: another way where its job is made again for a model with another template."""

    make: Callable[[], OutputReader] | None = None
    """Of one choice; None: all of it is text."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt for one model."""

    model: str
    """The name that workers hold it under."""
    request: worker_pb2.GenerateRequest
    """Without a request id. Never changed after it is built."""
    key: bytes
    """See core.routing.model.RouteRequest.ring_key."""
    n: int
    name: str = ""
    """What the client asked for."""
    max_wait_s: float = 0.0
    """Longest wait while no copy is ready; 0: the router's own."""
    max_depth: int = 0
    """Most requests that wait for the model; 0: the router's own."""
    route_keys: tuple[bytes, ...] = ()
    """Of the prompt; see naru_proto.route_keys."""
    key_tokens: tuple[int, ...] = ()
    """Estimated tokens up to the end of each of them."""
    num_tokens: int = 0
    """Of the prompt, estimated; 0: not known."""
    num_bytes: int = 0
    """Of the prompt's text; 0: it is token ids."""
    caller: Caller = ANYONE
    priority: int = 0
    """Lower is sooner."""
    deadline_s: float = math.inf
    """On the monotonic clock; then the answer is of no use."""
    request_id: str = ""
    """The client's or the edge's; for logs, traces and explanations."""
    is_knock: bool = False
    """Only brings the model up: not sent to a worker that has it ready."""
    service: Service | None = None
    """What answers to `name`; None: nobody asked for one."""
    readers: Readers = field(default_factory=Readers)
    """Of a chat: the same object for all jobs that are made for one call."""
    first_error: NaruError | None = None
    """Why what was asked for cannot be served, where this is the job of a model that stands in for it."""
    remake: Callable[[Service | None], Awaitable[Job]] | None = None
    """Makes it again for another model: the given one, or None: the one that serves `name` by then."""

    @property
    def make_reader(self) -> Callable[[], OutputReader] | None:
        """Reads a choice's output in the format of the model that is asked last: to be looked up when that begins."""
        return self.readers.make

    @property
    def label(self) -> str:
        """The model for people and metrics: revisions come and go under one name."""
        return base_name(self.model)


class Consumer(Protocol):
    """Takes the output of one job."""

    @property
    def has_sent(self) -> bool:
        """Whether the client has seen a byte of it."""

    def begin(self, decision: Decision, answers_as: str) -> None:
        """An attempt starts from the beginning; output of an earlier one is void.

        `answers_as`: the model that answers, where it is another one than was asked for; else empty.
        """

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes checked deltas, of whichever worker goes on with the attempt. The link's reader calls it."""


class SilentConsumer:
    """Takes what a knock brings: nothing."""

    has_sent = False

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Nothing to start."""

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Nothing to keep."""


@dataclass(slots=True)
class Course:
    """Where a request stands between its attempts. Mutable."""

    seat: Seat
    max_wait_s: float
    deadline_s: float
    """Until when it may wait for its model."""
    transcript: Transcript
    has_begun: bool = False
    """Something was sent; an attempt from the beginning needs another transcript."""
    goes_on: bool = False
    """The next attempt goes on where the last one was lost."""
    num_attempts: int = 0
    excluded: frozenset[Incarnation] = frozenset()
    lost: dict[Incarnation, object] = field(default_factory=dict)
    """Of those, the ones whose stream broke, and which life of their link that was."""
    is_lost: bool = False
    """The last attempt ended with its worker: another one comes in its place."""
    last_error: NaruError | None = None
    """Of the last attempt, told where no other worker can be had."""
    num_refusals: int = 0
    """Attempts that met a busy worker."""
    num_losses: int = 0
    """Attempts whose worker was lost while it may have run the request."""
    trace: RequestTrace | None = None
    may_raise: bool = True
    """Whether a worker may be asked to load the model for it."""
