"""One worker as the router sees it: a channel, one bidirectional stream for all requests, and who waits for what.

The fleet opens one link for each worker in the route map; the dispatcher submits requests and takes their deltas. The
link connects, connects again with growing pauses, and tells every waiting request when its stream is lost. It never
decides where a request goes or whether it is tried again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from naru_proto.errors import NaruError, Unavailable
from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.ticket import Ticket
from naru_router.core.retry import AttemptFailed, FailureKind

logger = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
"""A restarted worker is found within this, well below its lease."""
PROBE_TIMEOUT_S = 2.0
"""A living worker answers in milliseconds; its engine is on another thread."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""One frame holds the deltas of a step for all requests; prompt logprobs are the large ones."""
MAX_PACKED_BYTES = 1024 * 1024
"""Requests that wait together travel in one frame up to this size; a larger one travels alone."""

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    # Reconnecting is this module's: the channel's own pauses only add to ours.
    ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_MIN_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # One connection a link: a shared one would carry the dead worker's state to its successor.
    ("grpc.use_local_subchannel_pool", 1),
)


class WorkerLink:
    """The stream to one worker."""

    def __init__(
        self, worker_id: str, address: str, *, id_prefix: str, on_change: Callable[[], None], metrics: Metrics
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.is_up = False
        self.life = object()
        """Another one each time that the stream stands again."""
        self._is_closing = False
        self._stub: Any = None
        self._id_prefix = id_prefix
        self._on_change = on_change
        self._metrics = metrics
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self._requests: deque[worker_pb2.GenerateRequest] = deque()
        self._cancels: list[str] = []
        self._has_outgoing = asyncio.Event()
        self._in_flight = metrics.in_flight.labels(worker_id)
        self._up = metrics.worker_up.labels(worker_id)
        self._task = asyncio.create_task(self._run(), name=f"link to {worker_id}")

    @property
    def num_in_flight(self) -> int:
        """Requests open on this worker, of this router."""
        return len(self._tickets)

    def submit(self, request: worker_pb2.GenerateRequest) -> Ticket:
        """Sends a request under an id of its own; the message is copied.

        Raises:
            AttemptFailed: the stream is down.
        """
        if not self.is_up:
            raise self._lost("is not connected")
        ticket = Ticket(f"{self._id_prefix}-{next(self._numbers)}")
        sent = worker_pb2.GenerateRequest()
        sent.CopyFrom(request)
        sent.request_id = ticket.request_id
        self._requests.append(sent)
        self._tickets[ticket.request_id] = ticket
        self._in_flight.set(len(self._tickets))
        self._has_outgoing.set()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Forgets a request; one that is not done is cancelled on the worker."""
        if self._tickets.pop(ticket.request_id, None) is None:
            return
        self._in_flight.set(len(self._tickets))
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
        if not self.is_up:
            return False
        try:
            await self._stub.Describe(worker_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def close(self) -> None:
        """Ends the stream and everything that waits on it."""
        self._is_closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            backoff_s = BACKOFF_MIN_S
            while True:
                started_s = time.monotonic()
                try:
                    reason = await self._connect_and_serve()
                except Exception as exc:
                    # The top of the loop: whatever the library makes of a worker's bytes, the link connects again.
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
        async with grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS) as channel:
            try:
                async with asyncio.timeout(BACKOFF_MAX_S):
                    await channel.channel_ready()
            except TimeoutError:
                return "it does not answer"
            stub_class: Any = worker_pb2_grpc.WorkerStub
            self._stub = stub_class(channel)
            call = self._stub.Exchange()
            self._set_up()
            writer = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
                return "it ended the stream"
            except grpc.aio.AioRpcError as exc:
                return f"{exc.code().name}: {exc.details()}"
            finally:
                self._set_down("broke the stream")
                call.cancel()
                writer.cancel()
                # Only for what it may have raised: the stream's own end, which the reader has told already.
                await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        tickets = self._tickets
        while True:
            frame = await call.read()
            if not isinstance(frame, worker_pb2.WorkerFrame):
                return  # the end of the stream
            for delta in frame.deltas:
                ticket = tickets.get(delta.request_id)
                if ticket is not None:
                    ticket.put(delta)

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_outgoing.wait()
            frame = worker_pb2.RouterFrame(cancel=self._cancels)
            self._cancels = []
            num_bytes = 0
            while self._requests and (not frame.generate or num_bytes < MAX_PACKED_BYTES):
                request = self._requests.popleft()
                num_bytes += request.ByteSize()
                frame.generate.append(request)
            if not self._requests:
                self._has_outgoing.clear()
            await call.write(frame)

    def _cancel(self, ticket: Ticket) -> None:
        for request in self._requests:
            if request.request_id == ticket.request_id:
                self._requests.remove(request)  # not sent yet; a cancel must not overtake it
                return
        if self.is_up:
            self._cancels.append(ticket.request_id)
            self._has_outgoing.set()

    def _set_up(self) -> None:
        self.is_up = True
        self.life = object()
        self._up.set(1)
        self._on_change()

    def _set_down(self, reason: str) -> None:
        if self.is_up:
            self.is_up = False
            self._metrics.stream_losses.inc(0 if self._is_closing else 1)
        self._up.set(0)
        self._requests.clear()
        self._cancels.clear()
        self._has_outgoing.clear()
        for ticket in list(self._tickets.values()):
            if not ticket.is_done:
                ticket.fail(self._lost(reason))
        self._on_change()

    def _lost(self, reason: str) -> AttemptFailed:
        error = Unavailable(f"the worker {self.worker_id!r} {reason} before the answer was complete; send it again")
        return AttemptFailed(error, FailureKind.STREAM_LOST, is_retryable=True)
