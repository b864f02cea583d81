"""One worker as the router sees it: one bidirectional stream for all requests, and who waits for what.

The fleet opens one link for each worker in the route map; the dispatcher submits requests, whose deltas are handed on
in the turn of the event loop that reads them. The link connects, connects again with growing pauses, and tells every
waiting request when its stream is lost. It never decides where a request goes or whether it is tried again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from naru_proto.errors import NaruError, Unavailable
from naru_proto.v1 import worker_pb2
from naru_router.adapters.grpc_protocol import GrpcProtocol, open_stream
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.ticket import Ticket
from naru_router.adapters.worker_calls import WorkerCalls
from naru_router.core.http2.stream import StreamBroken
from naru_router.core.retry import AttemptFailed, FailureKind

logger = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
"""A restarted worker is found within this, well below its lease."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""One frame holds the deltas of a step for all requests; prompt logprobs are the large ones."""
MAX_PACKED_BYTES = 1024 * 1024
"""Requests that wait together travel in one frame up to this size; a larger one travels alone."""
_EXCHANGE = "/naru.v1.Worker/Exchange"


class WorkerLink:
    """The stream to one worker."""

    def __init__(
        self,
        worker_id: str,
        address: str,
        *,
        id_prefix: str,
        on_change: Callable[[], None],
        on_news: Callable[[str, worker_pb2.WorkerFrame], None],
        metrics: Metrics,
    ) -> None:
        """`on_news`: takes frames that tell of load or route keys, with the worker's id; must not fail."""
        self.worker_id = worker_id
        self.address = address
        self.is_up = False
        self.life = object()
        """Another one each time that the stream stands again."""
        self._is_closing = False
        self._stream: GrpcProtocol | None = None
        self._calls = WorkerCalls(worker_id, address)
        self._id_prefix = id_prefix
        self._on_change = on_change
        self._on_news = on_news
        self._metrics = metrics
        self._tickets: dict[str, Ticket] = {}
        self._num_open: Counter[str] = Counter()
        """By model."""
        self._numbers = itertools.count(1)
        self._requests: deque[worker_pb2.GenerateRequest] = deque()
        self._cancels: list[str] = []
        self._is_flush_due = False
        # Counted up and down: the link to a worker's successor may stand while this one is seen out.
        self._in_flight = metrics.in_flight.labels(worker_id)
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"link to {worker_id}")

    @property
    def num_in_flight(self) -> int:
        """Requests open on this worker, of this router."""
        return len(self._tickets)

    def num_open(self, model: str) -> int:
        """Of those, the ones for a model."""
        return self._num_open[model]

    def submit(self, request: worker_pb2.GenerateRequest, timeout_s: float = 0.0) -> Ticket:
        """Sends a request under an id of its own; the message is copied.

        Args:
            request: what to send.
            timeout_s: after so many seconds from now the answer is of no use; 0: no limit.

        Raises:
            AttemptFailed: the stream is down.
        """
        if not self.is_up:
            raise self._lost("is not connected")
        ticket = Ticket(f"{self._id_prefix}-{next(self._numbers)}", request.model)
        sent = worker_pb2.GenerateRequest()
        sent.CopyFrom(request)
        sent.request_id = ticket.request_id
        if timeout_s > 0:
            sent.timeout_s = timeout_s
        self._requests.append(sent)
        self._tickets[ticket.request_id] = ticket
        self._num_open[ticket.model] += 1
        self._in_flight.inc()
        self._flush_soon()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Forgets a request; one that is not done is cancelled on the worker."""
        if self._tickets.pop(ticket.request_id, None) is None:
            return
        self._num_open[ticket.model] -= 1
        if not self._num_open[ticket.model]:
            del self._num_open[ticket.model]
        self._in_flight.dec()
        if not ticket.is_done:
            self._cancel(ticket)

    def fail_all(self, error: NaruError, kind: FailureKind, *, is_retryable: bool) -> None:
        """Ends all open requests with an error and cancels them on the worker."""
        for ticket in list(self._tickets.values()):
            if not ticket.is_done:
                ticket.fail(AttemptFailed(error, kind, is_retryable=is_retryable))
                self._cancel(ticket)

    async def answers(self) -> bool:
        """Asks the worker to say anything at all: a machine that died sends no goodbye."""
        return self.is_up and await self._calls.answers()

    async def move(self, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Brings a model nearer or farther on the worker.

        Raises:
            NaruError: its refusal, or that it does not answer.
        """
        if not self.is_up:
            raise Unavailable(f"the worker {self.worker_id!r} is not connected; ask another one")
        return await self._calls.move(request, timeout_s)

    async def close(self) -> None:
        """Ends the stream and everything that waits on it."""
        self._is_closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._calls.close()

    async def _run(self) -> None:
        try:
            backoff_s = BACKOFF_MIN_S
            while True:
                started_s = time.monotonic()
                try:
                    reason = await self._connect_and_serve()
                except Exception as exc:
                    # The top of the loop: whatever becomes of a worker's bytes, the link connects again.
                    logger.exception("the stream to worker %s broke", self.worker_id)
                    reason = f"{type(exc).__name__}: {exc}"
                if time.monotonic() - started_s > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_MIN_S
                logger.info("no stream to worker %s at %s: %s", self.worker_id, self.address, reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        finally:
            self._set_down("is gone")

    async def _connect_and_serve(self) -> str:
        """One life of the stream; why it ended."""
        try:
            self._stream = await open_stream(
                self.address,
                _EXCHANGE,
                self._take_messages,
                max_message_bytes=MAX_FRAME_BYTES,
                timeout_s=BACKOFF_MAX_S,
            )
        except TimeoutError:
            return "it does not answer"
        except OSError as exc:
            return str(exc)
        self._set_up()
        try:
            return await self._stream.ended
        finally:
            self._set_down("broke the stream")
            self._stream.close()
            self._stream = None

    def _take_messages(self, messages: Sequence[bytes]) -> None:
        """Gives each request all that came for it in one read of the socket."""
        tickets = self._tickets
        addressed: list[Ticket] = []
        for message in messages:
            try:
                frame = worker_pb2.WorkerFrame.FromString(message)
            except DecodeError as exc:
                raise StreamBroken(f"it sent a message that is no WorkerFrame: {exc}") from exc
            if frame.HasField("load") or frame.route_keys:
                self._on_news(self.worker_id, frame)
            for delta in frame.deltas:
                ticket = tickets.get(delta.request_id)
                if ticket is not None:
                    if not ticket.pending:
                        addressed.append(ticket)
                    ticket.pending.append(delta)
        for ticket in addressed:
            ticket.deliver()

    def _flush_soon(self) -> None:
        # All that is submitted in one turn of the loop leaves in one write.
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._stream is not None and self.is_up and (self._requests or self._cancels):
            frame = worker_pb2.RouterFrame(cancel=self._cancels)
            self._cancels.clear()
            num_bytes = 0
            while self._requests and (not num_bytes or num_bytes < MAX_PACKED_BYTES):
                request = self._requests.popleft()
                num_bytes += request.ByteSize()
                frame.generate.append(request)
            self._stream.send(frame.SerializeToString())

    def _cancel(self, ticket: Ticket) -> None:
        for request in self._requests:
            if request.request_id == ticket.request_id:
                self._requests.remove(request)  # not sent yet; a cancel must not overtake it
                return
        if self.is_up:
            self._cancels.append(ticket.request_id)
            self._flush_soon()

    def _set_up(self) -> None:
        self.is_up = True
        self.life = object()
        self._on_change()

    def _set_down(self, reason: str) -> None:
        if self.is_up:
            self.is_up = False
            self._metrics.stream_losses.inc(0 if self._is_closing else 1)
        self._requests.clear()
        self._cancels.clear()
        for ticket in list(self._tickets.values()):
            if not ticket.is_done:
                ticket.fail(self._lost(reason))
        self._on_change()

    def _lost(self, reason: str) -> AttemptFailed:
        error = Unavailable(f"the worker {self.worker_id!r} {reason} before the answer was complete; send it again")
        return AttemptFailed(error, FailureKind.STREAM_LOST, is_retryable=True)
