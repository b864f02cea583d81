"""Single calls to one worker, beside its stream: rare, so that gRPC's own library serves. Used by the worker's link."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from naru_proto.errors import BY_CODE, InternalError, NaruError, Unavailable
from naru_proto.names import METADATA_ERROR_CODE
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

PROBE_TIMEOUT_S = 2.0
"""A living worker answers in milliseconds; its engine is on another thread."""

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A connection of its own: a shared one would carry the dead worker's state to its successor.
    ("grpc.use_local_subchannel_pool", 1),
)
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WorkerCalls:
    """The channel for them, opened when it is first needed."""

    def __init__(self, worker_id: str, address: str) -> None:
        self._worker_id = worker_id
        self._address = address
        self._channel: Any = None
        self._stub: Any = None

    async def answers(self) -> bool:
        """Whether the worker says anything at all."""
        try:
            await self._worker().Describe(worker_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def move(self, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Brings a model nearer or farther.

        Raises:
            NaruError: the worker's refusal, or that it does not answer.
        """
        try:
            reply: worker_pb2.MoveReply = await self._worker().Move(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _error(exc, self._worker_id) from exc
        return reply

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._stub = None

    def _worker(self) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
            stub_class: Any = worker_pb2_grpc.WorkerStub
            self._stub = stub_class(self._channel)
        return self._stub


def _error(failed: grpc.aio.AioRpcError, worker_id: str) -> NaruError:
    """The worker's own error where it says which; else what its status means."""
    details = failed.details() or failed.code().name
    metadata: Any = failed.trailing_metadata() or ()
    kind = next((BY_CODE.get(str(value)) for key, value in metadata if key == METADATA_ERROR_CODE), None)
    if kind is not None:
        return kind(details)
    if failed.code() in _NO_ANSWER:
        return Unavailable(f"the worker {worker_id!r} does not answer: {details}; ask another one")
    return InternalError(f"the worker {worker_id!r} refused: {failed.code().name}: {details}")
