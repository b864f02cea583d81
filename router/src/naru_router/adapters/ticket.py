"""One request on a link to a worker: its inbox of deltas, and who takes them.

The link's reader puts deltas in and delivers them once a read; they reach their taker in that same turn of the event
loop, without the task that waits for the request's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from naru_proto.v1 import worker_pb2
from naru_router.core.retry import AttemptFailed


class Ticket:
    """One request on a link. Mutable."""

    __slots__ = ("_failure", "_is_over", "_take", "_waiter", "is_done", "model", "pending", "request_id")

    def __init__(self, request_id: str, model: str = "") -> None:
        self.request_id = request_id
        self.model = model
        self.is_done = False
        """No delta follows: the worker has ended the request, or the stream is gone."""
        self.pending: list[worker_pb2.Delta] = []
        """Deltas that came and were not delivered; only the link's reader adds to it."""
        self._take: Callable[[Sequence[worker_pb2.Delta]], None] | None = None
        self._is_over = False
        """Nothing is taken any more."""
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def arrived(self, timeout_s: float) -> bool:
        """Whether a delta or the end comes within the time; takes nothing."""
        if self.pending or self._is_over:
            return True
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter
        except TimeoutError:
            return False
        return True

    async def pour(self, take: Callable[[Sequence[worker_pb2.Delta]], None]) -> None:
        """Has `take` called with all deltas, past ones first; returns when the worker has ended the request.

        Raises:
            AttemptFailed: the stream is gone.
            Exception: what `take` raised; it is not called again.
        """
        self._take = take
        try:
            if self.pending:
                self.deliver()
            if not self._is_over:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        finally:
            self._take = None  # it knows the attempt, which knows this ticket: a ring that holds all of the request
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback has this frame

    def deliver(self) -> None:
        """Hands on what is pending, where somebody takes it."""
        deltas = self.pending
        self.is_done = self.is_done or deltas[-1].request_done
        if self._take is not None and not self._is_over:
            self.pending = []
            try:
                self._take(deltas)
            except Exception as exc:
                # Whatever it is belongs to this request, whose own task raises it; the other requests go on.
                self._end(exc)
                return
            if self.is_done:
                self._end(None)
        elif self._waiter is not None:
            self._wake()

    def fail(self, failure: AttemptFailed) -> None:
        """Ends the ticket after the deltas it already holds."""
        self.is_done = True
        if not self._is_over:
            self._end(failure)

    def _end(self, failure: Exception | None) -> None:
        self._is_over = True
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
