"""Commands and questions to workers over gRPC: load, unload, explain. Called by the controller and `naru explain`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from naru_operator.core.desired import EngineLimits, Residency, Tier
from naru_operator.core.model_plan import LoadModel, UnloadModel
from naru_proto import names
from naru_proto.errors import BY_CODE, InternalError, ModelNotFound, NaruError, StaleCommand, Unavailable
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

_TIERS = {Tier.COLD: worker_pb2.TIER_COLD, Tier.ACTIVE: worker_pb2.TIER_ACTIVE}

_IDLE_MS = 10_000
"""Without a call for so long the connection is let go until the next one: pings keep both ends from their rest."""
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
    eta_s: float = 0.0
    """Seconds left; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a model is on a worker, and why."""

    state: str
    """Lower-case ModelState."""
    reasons: tuple[str, ...]
    """Sentences, most important first."""


class WorkerClient:
    """A channel to one worker."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.client_idle_timeout_ms", _IDLE_MS)])
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def load(self, command: LoadModel) -> AsyncIterator[LoadReport]:
        """Asks for a model at the tier of its residency; reports until it is there.

        Raises:
            NaruError: as the worker said; `Unavailable` if it went away meanwhile.
        """
        request = worker_pb2.LoadRequest(
            model=command.model,
            uri=command.uri,
            revision=command.revision,
            generation=command.generation,
            options=_options(command.limits),
            tier=_TIERS[command.residency.tier],
            residency=_residency(command.residency),
            credentials=command.credentials,
        )
        try:
            async for progress in self._stub.Load(request):
                if progress.HasField("error"):
                    raise _from_wire(progress.error)
                state = _state(progress.state)
                yield LoadReport(state, progress.bytes_done, progress.bytes_total, progress.detail, progress.eta_s)
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

    async def explain(self, model: str, timeout_s: float) -> Explanation:
        """Why a model is where it is on this worker.

        Raises:
            ModelNotFound: the worker does not know it.
            NaruError: as the worker said; `Unavailable` if it does not answer in time.
        """
        try:
            reply = await self._stub.Explain(worker_pb2.ExplainRequest(model=model), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise _from_status(exc) from exc
        return Explanation(_state(reply.state), tuple(reply.reasons))

    async def known(self, timeout_s: float) -> dict[str, tuple[int, bool]]:
        """Models the worker was told of and has not been told to forget, held or not.

        With each the generation, and whether it was told to load it ahead of requests.

        Raises:
            NaruError: as the worker said; `Unavailable` if it does not answer in time.
        """
        try:
            reply = await self._stub.Describe(worker_pb2.DescribeRequest(known=True), timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            if exc.code() == grpc.StatusCode.UNIMPLEMENTED:
                return {}
            raise _from_status(exc) from exc
        # An older worker does not say: then a model that is not there counts as evicted, and is left alone.
        return {each.model: (each.generation, each.tier != worker_pb2.TIER_COLD) for each in reply.known}

    async def close(self) -> None:
        """Ends calls under way and closes the channel."""
        await self._channel.close(None)


def _options(limits: EngineLimits) -> worker_pb2.EngineOptions:
    return worker_pb2.EngineOptions(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_bytes=limits.kv_cache_bytes,
        kv_cache_min_bytes=limits.kv_cache_min_bytes,
        enable_prefix_caching=limits.enable_prefix_caching,
        kv_cache_dtype=limits.kv_cache_dtype,
        max_batch_size=limits.max_batch_size,
        max_batch_delay_s=limits.max_batch_delay_s,
        speculation=limits.speculation,
        max_draft_tokens=limits.max_draft_tokens,
        tensor_parallel_size=limits.tensor_parallel_size,
    )


def _residency(residency: Residency) -> worker_pb2.Residency:
    return worker_pb2.Residency(
        pinned=residency.pinned,
        priority=residency.priority,
        min_residency_s=residency.min_residency_s,
        idle_ttl_s=residency.idle_ttl_s,
        keep_last_copy=residency.keep_last_copy,
    )


def _state(state: worker_pb2.ModelState) -> str:
    # A worker of a later version may have states that this table lacks.
    name = worker_pb2.ModelState.Name(state) if state in worker_pb2.ModelState.values() else f"state {state}"
    return name.removeprefix("MODEL_STATE_").lower()


def _from_wire(error: worker_pb2.Error) -> NaruError:
    return BY_CODE.get(error.code, InternalError)(error.message, param=error.param)


def _from_status(exc: grpc.aio.AioRpcError) -> NaruError:
    detail = exc.details() or exc.code().name
    trailing: Any = exc.trailing_metadata() or ()
    metadata = {key: value for key, value in trailing}
    code = metadata.get(names.METADATA_ERROR_CODE)
    if code == StaleCommand.code:
        newest = str(metadata.get(names.METADATA_GENERATION, ""))
        return StaleCommand(detail, newest_generation=int(newest) if newest.isascii() and newest.isdigit() else 0)
    if code in BY_CODE:
        return BY_CODE[str(code)](detail)
    if exc.code() == grpc.StatusCode.NOT_FOUND:
        return ModelNotFound(detail)
    if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"the worker went away or does not answer ({exc.code().name}: {detail})")
    return InternalError(f"the worker refused ({exc.code().name}: {detail})")
