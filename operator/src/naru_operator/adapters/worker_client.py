"""Commands to workers over gRPC: load, unload. Called by the controller; decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from naru_operator.core.desired import EngineLimits
from naru_operator.core.local_plan import LoadModel, UnloadModel
from naru_proto.errors import BY_CODE, InternalError, NaruError, Unavailable
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

_METADATA_CODE = "naru-error-code"
"""Trailing metadata of a worker's refusal: the error's code, finer than the status."""

_UNLOAD_SPARE_S = 30.0
"""On top of the drain: time in which a worker must have freed the memory."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How far a load is."""

    state: str
    """Lower-case ModelState."""
    bytes_done: int
    bytes_total: int
    """0: unknown."""
    detail: str


class WorkerClient:
    """A channel to one worker."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def load(self, command: LoadModel) -> AsyncIterator[LoadReport]:
        """Loads a model; reports until it is ready.

        Raises:
            NaruError: as the worker said; `Unavailable` if it went away meanwhile.
        """
        request = worker_pb2.LoadRequest(
            model=command.model,
            uri=command.uri,
            revision=command.revision,
            generation=command.generation,
            options=_options(command.limits),
        )
        try:
            async for progress in self._stub.Load(request):
                if progress.HasField("error"):
                    raise _from_wire(progress.error)
                state = worker_pb2.ModelState.Name(progress.state).removeprefix("MODEL_STATE_").lower()
                yield LoadReport(state, progress.bytes_done, progress.bytes_total, progress.detail)
        except grpc.aio.AioRpcError as exc:
            raise _from_status(exc) from exc

    async def unload(self, command: UnloadModel) -> None:
        """Takes a model off the worker; returns when its memory is free.

        Raises:
            NaruError: as the worker said; `Unavailable` if it went away meanwhile.
        """
        request = worker_pb2.UnloadRequest(
            model=command.model, generation=command.generation, drain_timeout_s=command.drain_timeout_s
        )
        try:
            await self._stub.Unload(request, timeout=command.drain_timeout_s + _UNLOAD_SPARE_S)
        except grpc.aio.AioRpcError as exc:
            raise _from_status(exc) from exc

    async def close(self) -> None:
        """Ends calls under way and closes the channel."""
        await self._channel.close(None)


def _options(limits: EngineLimits) -> worker_pb2.EngineOptions:
    return worker_pb2.EngineOptions(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_bytes=limits.kv_cache_bytes,
        enable_prefix_caching=limits.enable_prefix_caching,
    )


def _from_wire(error: worker_pb2.Error) -> NaruError:
    return BY_CODE.get(error.code, InternalError)(error.message, param=error.param)


def _from_status(exc: grpc.aio.AioRpcError) -> NaruError:
    detail = exc.details() or exc.code().name
    trailing: Any = exc.trailing_metadata() or ()
    for key, code in trailing:
        if key == _METADATA_CODE and code in BY_CODE:
            return BY_CODE[str(code)](detail)
    if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"the worker went away or does not answer ({exc.code().name}: {detail})")
    return InternalError(f"the worker refused ({exc.code().name}: {detail})")
