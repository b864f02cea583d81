"""Carries a request's deltas from its ticket to its consumer until the worker has ended it. Used by the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from naru_proto.errors import BY_CODE, InternalError, Unavailable
from naru_proto.v1 import inference_pb2, worker_pb2
from naru_router.adapters.course import Consumer
from naru_router.adapters.ticket import Ticket
from naru_router.core.retry import AttemptFailed, FailureKind
from naru_router.core.transcript import Transcript


async def pump(
    ticket: Ticket, n: int, consumer: Consumer, transcript: Transcript, on_first: Callable[[], None]
) -> None:
    """Returns when the worker has ended the request; what came is in `transcript`, too.

    `on_first` is called once, when the first output is in it.

    Raises:
        AttemptFailed: the worker was lost, refuses, or breaks the protocol.
    """
    is_first = True

    def take(deltas: Sequence[worker_pb2.Delta]) -> None:
        nonlocal is_first
        check_deltas(deltas, n)
        transcript.add(deltas)
        if is_first:
            is_first = False
            on_first()
        consumer.feed(deltas)

    await ticket.pour(take)


def check_deltas(deltas: Sequence[worker_pb2.Delta], n: int) -> None:
    """Checks the deltas of one delivery before anybody uses them. An error is the last one: it ends the request.

    Raises:
        AttemptFailed: the worker reports an error or breaks the protocol.
    """
    last = deltas[-1]
    if last.HasField("error"):
        error = last.error
        raised = BY_CODE.get(error.code, InternalError)(error.message, param=error.param)
        raised.retry_after_s = error.retry_after_s
        raise AttemptFailed(raised, FailureKind.WORKER_ERROR, is_retryable=error.retryable)
    for delta in deltas:
        if delta.index and not 0 <= delta.index < n:
            raised = InternalError(f"the worker sent choice {delta.index} of {n}; send the request again")
            raise AttemptFailed(raised, FailureKind.WORKER_ERROR, is_retryable=True)
        if delta.finish_reason > inference_pb2.FINISH_REASON_LENGTH:
            raise AttemptFailed(
                Unavailable("the worker ended the request early; send it again"),
                FailureKind.WORKER_ERROR,
                is_retryable=True,
            )
