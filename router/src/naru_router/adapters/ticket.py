"""One request on a link to a worker: its inbox of deltas, and what is checked before anybody uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from naru_proto.errors import BY_CODE, InternalError, Unavailable
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.core.retry import AttemptFailed, FailureKind


class Ticket:
    """One request on a link: an inbox of deltas with one reader."""

    __slots__ = ("_deltas", "_failure", "_waiter", "is_done", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_done = False
        """No delta follows: the worker has ended the request, or the stream is gone."""
        self._deltas: list[worker_pb2.Delta] = []
        self._failure: AttemptFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def arrived(self, timeout_s: float) -> bool:
        """Whether a delta or the end comes within the time; takes nothing."""
        if self._deltas or self._failure is not None:
            return True
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter
        except TimeoutError:
            return False
        return True

    async def take(self) -> list[worker_pb2.Delta]:
        """All deltas that have come, at least one.

        Raises:
            AttemptFailed: none is left and none will come.
        """
        if not self._deltas:
            if self._failure is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if not self._deltas:
                assert self._failure is not None  # whoever wakes the reader brings a delta or a failure
                raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas

    def put(self, delta: worker_pb2.Delta) -> None:
        """Adds a delta and wakes the reader."""
        self._deltas.append(delta)
        self.is_done = self.is_done or delta.request_done
        self._wake()

    def fail(self, failure: AttemptFailed) -> None:
        """Ends the ticket after the deltas it already holds."""
        self.is_done = True
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def check_deltas(deltas: Iterable[worker_pb2.Delta], n: int) -> None:
    """Checks deltas before anybody uses them.

    Raises:
        AttemptFailed: the worker reports an error or breaks the protocol.
    """
    for delta in deltas:
        if delta.HasField("error"):
            error = delta.error
            raised = BY_CODE.get(error.code, InternalError)(error.message, param=error.param)
            raise AttemptFailed(raised, FailureKind.WORKER_ERROR, is_retryable=error.retryable)
        if not 0 <= delta.index < n:
            raised = InternalError(f"the worker sent choice {delta.index} of {n}; send the request again")
            raise AttemptFailed(raised, FailureKind.WORKER_ERROR, is_retryable=True)
        if delta.finish_reason > inference_pb2.FINISH_REASON_LENGTH:
            raise AttemptFailed(
                Unavailable("the worker ended the request early; send it again"),
                FailureKind.WORKER_ERROR,
                is_retryable=True,
            )
