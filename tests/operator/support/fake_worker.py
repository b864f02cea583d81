"""A worker without models: the real gRPC service and a real lease, with loads that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import redis.asyncio

from naru_proto import names
from naru_proto.registry import ResidentRecord, WorkerRecord
from naru_proto.v1 import worker_pb2, worker_pb2_grpc

COLD = worker_pb2.MODEL_STATE_COLD
READY = worker_pb2.MODEL_STATE_READY
FETCHING = worker_pb2.MODEL_STATE_FETCHING


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Remembers commands; `hold` delays the end of loads, `error` fails them."""

    def __init__(self, worker_id: str, redis_url: str) -> None:
        self.worker_id = worker_id
        self.models: dict[str, ResidentRecord] = {}
        self.known: set[str] = set()
        """Told of, and not in `models`: no lease shows them."""
        self.told: dict[str, worker_pb2.KnownModel] = {}
        """What it was told of and not told to forget."""
        self.newest: dict[str, int] = {}
        """Model to the newest generation seen; older ones are refused."""
        self.node = ""
        self.is_mute = False
        """Explains nothing, ever."""
        self.loads: list[worker_pb2.LoadRequest] = []
        self.unloads: list[worker_pb2.UnloadRequest] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.error: worker_pb2.Error | None = None
        self.abort: tuple[grpc.StatusCode, str, str] | None = None
        self.address = ""
        self._redis = redis.asyncio.Redis.from_url(redis_url)
        self._server = grpc.aio.server()

    async def Load(self, request: worker_pb2.LoadRequest, context: Any) -> AsyncIterator[worker_pb2.LoadProgress]:
        """Progress, then the end that the test wants."""
        self.loads.append(request)
        await self._refuse_stale(request.model, request.generation, context)
        if self.abort is None:
            told = worker_pb2.KnownModel(model=request.model, generation=request.generation, tier=request.tier)
            self.told[request.model] = told
        if request.tier == worker_pb2.TIER_COLD and self.abort is None and self.error is None:
            self.known.add(request.model)
            await self.may_end.wait()
            yield worker_pb2.LoadProgress(state=COLD)
            return
        yield worker_pb2.LoadProgress(state=FETCHING, bytes_done=1, bytes_total=2, detail="half")
        await self.may_end.wait()
        if self.abort is not None:
            status, detail, code = self.abort
            await context.abort(status, detail, ((names.METADATA_ERROR_CODE, code),) if code else ())
        if self.error is not None:
            yield worker_pb2.LoadProgress(state=worker_pb2.MODEL_STATE_FAILED, error=self.error)
            return
        self.models[request.model] = ResidentRecord("ready", request.generation)
        yield worker_pb2.LoadProgress(state=READY)

    async def Unload(self, request: worker_pb2.UnloadRequest, context: Any) -> worker_pb2.UnloadReply:
        """Forgets the model."""
        self.unloads.append(request)
        await self._refuse_stale(request.model, request.generation, context)
        self.models.pop(request.model, None)
        self.known.discard(request.model)
        self.told.pop(request.model, None)
        return worker_pb2.UnloadReply()

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeReply:
        """What it knows."""
        return worker_pb2.DescribeReply(worker_id=self.worker_id, known=self.told.values())

    async def Explain(self, request: worker_pb2.ExplainRequest, context: Any) -> worker_pb2.ExplainReply:
        """Two sentences."""
        if self.is_mute:
            await asyncio.Event().wait()
        if request.model in self.models:
            state = f"MODEL_STATE_{self.models[request.model].state.upper()}"
            return worker_pb2.ExplainReply(state=state, reasons=["It is used.", "It was loaded for a request."])
        if request.model in self.known:
            return worker_pb2.ExplainReply(state=COLD, reasons=["Nobody has asked for it."])
        code = (names.METADATA_ERROR_CODE, "model_not_found")
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such model here", (code,))
        raise AssertionError("abort raises")

    async def _refuse_stale(self, model: str, generation: int, context: Any) -> None:
        newest = self.newest.get(model, 0)
        if generation < newest:
            code = (names.METADATA_ERROR_CODE, "stale_command")
            seen = (names.METADATA_GENERATION, str(newest))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer command was seen", (code, seen))
        self.newest[model] = generation

    async def start(self) -> None:
        """Serves and takes a lease."""
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self.renew()

    async def renew(self, **changes: Any) -> None:
        """Writes the lease as things are now."""
        fields = {"epoch": "1", "models": dict(self.models), "node": self.node, **changes}
        record = WorkerRecord(self.worker_id, self.address, **fields)
        await self._redis.set(names.key_worker(self.worker_id), record.to_json())
        await self._redis.sadd(names.KEY_WORKERS, self.worker_id)
        await self._redis.publish(names.CHANNEL_CHANGES, f"worker:{self.worker_id}")

    async def stop(self) -> None:
        """Gone without a word: the lease stays."""
        await self._server.stop(None)
        await self._redis.aclose()
