"""What the endpoints that have a model do something share: admission, the body, the envelope, errors, counts.

Errors are in the form of the endpoint's API, as a reply before the first byte and as an event after it.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from naru_proto.errors import Cancelled, InternalError, NaruError
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.gate import Gate
from naru_router.adapters.http.body import read_object
from naru_router.adapters.http.consumers import answer_headers
from naru_router.adapters.http.counts import Counts
from naru_router.adapters.http.keepalive import KeepAlive, read_keepalive
from naru_router.adapters.http.messages import Headers, HttpRequest, Reply
from naru_router.adapters.http.responses import EventStream, send_error
from naru_router.adapters.jobs import JobMaker
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.envelope import NO_ENVELOPE, Envelope, read_envelope
from naru_router.core.error_forms import OPENAI_ERRORS, ErrorForm
from naru_router.core.routing.model import Decision

logger = logging.getLogger(__name__)

UNKNOWN_MODEL = ""
"""Label of requests whose model was never found: names come from clients and would pile up."""


def anyone(headers: Headers) -> Caller:
    """Everybody is nobody in particular."""
    return ANYONE


def none(caller: Caller) -> Headers:
    """No quotas, nothing to tell."""
    return ()


@dataclass(frozen=True, slots=True)
class Edge:
    """What both endpoints work with."""

    jobs: JobMaker
    dispatcher: Dispatcher
    gate: Gate
    counts: Counts
    max_body_bytes: int
    caller_of: Callable[[Headers], Caller] = anyone
    """Who sends a request with these headers; raises NaruError where nobody may."""
    rate_headers: Callable[[Caller], Headers] = none
    """What is left of a caller's quotas."""


class Routed(Protocol):
    """A consumer that knows where its job went."""

    decision: Decision | None
    answers_as: str


class QuotaHead:
    """Puts what is left of a caller's quotas into a reply's head.

    Apart from the exchange, which would hold itself through its stream: each request, with its body, would be left to
    the garbage collector, which looks rarely.
    """

    __slots__ = ("_rate_headers", "_reply", "caller")

    def __init__(self, reply: Reply, rate_headers: Callable[[Caller], Headers]) -> None:
        self._reply = reply
        self._rate_headers = rate_headers
        self.caller = ANYONE

    def tell(self) -> None:
        """Adds the headers, if the head has not been sent."""
        if not self._reply.has_started:
            for name, value in self._rate_headers(self.caller):
                self._reply.extra += b"%b: %b\r\n" % (name, value)


class Exchange:
    """One request and its reply."""

    def __init__(
        self, edge: Edge, endpoint: str, request: HttpRequest, reply: Reply, errors: ErrorForm = OPENAI_ERRORS
    ) -> None:
        self.edge = edge
        self.endpoint = endpoint
        self.request = request
        self.reply = reply
        self._quotas = QuotaHead(reply, edge.rate_headers)
        self.stream = EventStream(reply, self._quotas.tell)
        self.errors = errors
        """How a failure is told; an endpoint may put a form in its place that knows what was sent already."""
        self._envelope = NO_ENVELOPE
        self.model = UNKNOWN_MODEL
        self.answer_id = os.urandom(12).hex()
        self.created_s = int(time.time())
        self._start_s = time.perf_counter()
        self._has_first_byte = False

    @property
    def envelope(self) -> Envelope:
        """Who asks and how; nobody's until it was read."""
        return self._envelope

    @envelope.setter
    def envelope(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self._quotas.caller = envelope.caller

    def elapsed_s(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._start_s

    def on_first_byte(self) -> None:
        """Notes the time to the first token of the reply; again: nothing."""
        if self._has_first_byte:
            return
        self._has_first_byte = True
        self.edge.counts.first_byte(self.endpoint, self.model, self.elapsed_s())

    def kept_alive(self, is_stream: bool) -> KeepAlive:
        """A context in which a silent stream gets comments, where the client asks for them.

        Raises:
            InvalidRequest: it asks for them in a way that makes no sense.
        """
        return KeepAlive(self.stream, read_keepalive(self.request.text) if is_stream else 0.0)

    def tell_quotas(self) -> None:
        """Puts what is left of the caller's quotas into the reply's head, if that has not been sent."""
        self._quotas.tell()

    def route_headers(self, consumers: Sequence[Routed]) -> Headers:
        """What is told of the first prompt; the others of a call are found by their counts in the metrics."""
        self.tell_quotas()
        first = consumers[0]
        if first.decision is None:
            return ()
        return answer_headers(first.decision, first.answers_as, is_explained=self.envelope.is_explained)


class GenerationEndpoint(abc.ABC):
    """One endpoint that has a model do something."""

    name: str
    """In metrics."""
    errors: ErrorForm = OPENAI_ERRORS
    methods: tuple[bytes, ...] = (b"POST",)

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def serve(self, request: HttpRequest, reply: Reply) -> None:
        """Answers one request; cancelled when the client leaves."""
        exchange = Exchange(self._edge, self.name, request, reply, self.errors_of(request))
        status = "500"
        try:
            status = await self._serve(exchange)
        except asyncio.CancelledError:
            status = "499"
            raise
        finally:
            exchange.errors = self.errors  # one that an endpoint put there may know the exchange: nothing is to be left
            self._edge.counts.request(self.name, exchange.model, status, exchange.elapsed_s())

    def errors_of(self, request: HttpRequest) -> ErrorForm:
        """How failures of this request are told."""
        return self.errors

    def read(self, request: HttpRequest) -> dict[str, object]:
        """The request's body.

        Raises:
            InvalidRequest: it is none that this endpoint takes.
        """
        return read_object(request, self._edge.max_body_bytes)

    @abc.abstractmethod
    async def answer(self, body: dict[str, object], exchange: Exchange) -> None:
        """Runs the call and sends its answer."""

    async def _serve(self, exchange: Exchange) -> str:
        edge, request = self._edge, exchange.request
        try:
            with edge.gate.admit():
                caller = edge.caller_of(request.headers)
                body = self.read(request)
                exchange.envelope = read_envelope(
                    request.text,
                    caller,
                    request.request_id,
                    priority=body.get("priority"),
                    cache_key=body.get("prompt_cache_key"),
                )
                await self.answer(body, exchange)
                return "200"
        except Cancelled:
            return "499"
        except NaruError as exc:
            status = _fail(exchange, exc)
            # Its traceback and its causes hold frames that hold it: a ring with all of the request in it.
            exc.__traceback__ = exc.__cause__ = exc.__context__ = None
            return status
        except Exception:
            # The top of the request: the client gets an answer, the log gets the trace, the router lives on.
            logger.exception("request %s failed", request.request_id)
            return _fail(exchange, InternalError("the router failed on this request; its log says why"))


def _fail(exchange: Exchange, error: NaruError) -> str:
    if exchange.reply.is_over:
        return "500"
    if exchange.stream.has_started:
        logger.warning("request %s failed in its stream: %s", exchange.request.request_id, error.message)
        exchange.stream.close_with_error(error, exchange.errors)
        return "stream_error"
    exchange.tell_quotas()
    return str(send_error(exchange.reply, error, form=exchange.errors))
