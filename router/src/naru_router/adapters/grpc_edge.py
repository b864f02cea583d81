"""What the calls of all public gRPC services share: who asks and how, admission, counts, errors, replies in turn."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from naru_proto import names
from naru_proto.errors import Cancelled, InternalError, NaruError
from naru_proto.v1 import worker_pb2
from naru_router.adapters.gate import Gate
from naru_router.adapters.grpc_errors import abort
from naru_router.adapters.metrics import Metrics
from naru_router.core.caller import Caller
from naru_router.core.envelope import Envelope, read_envelope
from naru_router.core.errors import error_shape
from naru_router.core.routing.model import Decision

logger = logging.getLogger(__name__)

MAX_UNSENT_REPLIES = 65_536
"""Of one call: a client that lets more pile up reads too slowly."""


@dataclass(slots=True)
class Call:
    """One call, for the metrics. Mutable."""

    model: str = ""
    answers_as: str = ""
    """The model that answers, where it is another one than was asked for."""


class GrpcEdge:
    """Beside all services."""

    def __init__(self, gate: Gate, metrics: Metrics, caller_of: Callable[[Any], Caller]) -> None:
        """`caller_of`: who sends a call with this metadata; raises NaruError where nobody may."""
        self._gate = gate
        self._metrics = metrics
        self._caller_of = caller_of

    def caller(self, context: Any) -> Caller:
        """Who sends a call.

        Raises:
            Unauthenticated: nobody who is known.
        """
        return self._caller_of(context.invocation_metadata())

    def envelope(self, request_id: str, context: Any) -> Envelope:
        """What the call's metadata says; its own deadline counts where it is sooner.

        Raises:
            NaruError: it says something that makes no sense, or nobody known sends it.
        """
        metadata = context.invocation_metadata()
        texts = {name: value for name, value in metadata or () if isinstance(value, str)}
        envelope = read_envelope(texts.get, self._caller_of(metadata), request_id)
        remaining_s = context.time_remaining()
        if remaining_s is None or 0 < envelope.timeout_s <= remaining_s:
            return envelope
        return dataclasses.replace(envelope, timeout_s=max(0.001, remaining_s))

    @contextlib.asynccontextmanager
    async def counting(self, endpoint: str) -> AsyncIterator[Call]:
        """Admits a call and counts it; what is no error of ours becomes one.

        Raises:
            NaruError: it failed.
        """
        call, status, began_s = Call(), "INTERNAL", time.perf_counter()
        try:
            with self._gate.admit():
                yield call
            status = "OK"
        except NaruError as exc:
            status = error_shape(exc).grpc
            raise
        except asyncio.CancelledError:
            status = "CANCELLED"
            raise
        except Exception as exc:
            # The top of the call: the client gets a status, the log gets the trace, the router lives on.
            logger.exception("a gRPC call failed")
            raise InternalError("the router failed on this request; its log says why") from exc
        finally:
            self._metrics.requests.labels(endpoint, call.model, status).inc()
            self._metrics.request_seconds.labels(endpoint, call.model).observe(time.perf_counter() - began_s)

    @contextlib.asynccontextmanager
    async def answering(self, endpoint: str, context: Any) -> AsyncIterator[Call]:
        """The same, ending the call with a status where it fails."""
        try:
            async with self.counting(endpoint) as call:
                yield call
            if call.answers_as:
                context.set_trailing_metadata(((names.HEADER_MODEL, call.answers_as),))
        except NaruError as exc:
            await abort(context, exc)

    @contextlib.asynccontextmanager
    async def failing(self, context: Any) -> AsyncIterator[None]:
        """Ends a call that only reads with a status where it fails; such calls are neither refused nor counted."""
        try:
            yield
        except NaruError as exc:
            await abort(context, exc)


class ReplyMaker(Protocol):
    """Turns the deltas of one attempt into replies."""

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> Sequence[Any]:
        """The replies of the deltas, possibly none."""


_M = TypeVar("_M", bound=ReplyMaker)


class ReplyWriter(Generic[_M]):
    """Takes a job's output and makes replies of it, which are sent beside the request, one after the other."""

    def __init__(self, make_replies: Callable[[], _M]) -> None:
        """`make_replies`: called anew for each attempt."""
        self._make_replies = make_replies
        self.replies = make_replies()
        self._line: deque[Any] = deque()
        self._has_news = asyncio.Event()
        self._is_complete = False
        self.has_sent = False
        self.answers_as = ""
        """The model that answers, where it is another one than was asked for."""

    def begin(self, decision: Decision, answers_as: str) -> None:
        """Starts over; only ever called before anything was sent."""
        self.answers_as = answers_as
        self.replies = self._make_replies()

    def feed(self, deltas: Sequence[worker_pb2.Delta]) -> None:
        """Takes the deltas that say something.

        Raises:
            Cancelled: the client reads too slowly.
        """
        replies = self.replies.feed(deltas)
        if not replies:
            return
        self.has_sent = True
        self._line.extend(replies)
        if len(self._line) > MAX_UNSENT_REPLIES:
            raise Cancelled(f"more than {MAX_UNSENT_REPLIES} replies wait for the client; read faster")
        self._has_news.set()

    @contextlib.asynccontextmanager
    async def writing(self, send: Callable[[Any], Awaitable[object]]) -> AsyncIterator[None]:
        """Sends beside the block; what has come in it is sent before it ends well."""
        writer = asyncio.create_task(self._write(send))
        try:
            yield
            self._is_complete = True
            self._has_news.set()
            await writer
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, send: Callable[[Any], Awaitable[object]]) -> None:
        while self._line or not self._is_complete:
            if not self._line:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            await send(self._line.popleft())
