"""A worker that speaks naru.v1.Worker and says what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire
from naru_proto.v1 import worker_pb2_grpc

STOP = inf.FINISH_REASON_STOP
LENGTH = inf.FINISH_REASON_LENGTH
Script = Callable[[wire.GenerateRequest], AsyncIterator[wire.Delta]]


def usage(prompt: int = 5, completion: int = 1, cached: int = 0) -> inf.Usage:
    return inf.Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def say(*texts: str, finish: inf.FinishReason = STOP, cached: int = 0) -> Script:
    """One token a text for each choice; the last delta of a choice carries no text."""

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        n = request.sampling.n or 1
        for text in texts:
            for index in range(n):
                yield wire.Delta(index=index, text=text, num_tokens=1)
        for index in range(n):
            delta = wire.Delta(index=index, finish_reason=finish)
            if index == n - 1:
                delta.usage.CopyFrom(usage(completion=len(texts) * n, cached=cached))
                delta.request_done = True
            yield delta

    return script


def fail(code: str, message: str = "it went wrong", *, retryable: bool = False, param: str = "") -> Script:
    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        error = wire.Error(code=code, message=message, retryable=retryable, param=param)
        yield wire.Delta(error=error, request_done=True)

    return script


def play(deltas: Sequence[wire.Delta]) -> Script:
    """Exactly these deltas."""

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for delta in deltas:
            copy = wire.Delta()
            copy.CopyFrom(delta)
            yield copy

    return script


def hang(*texts: str) -> Script:
    """The texts, then silence until cancelled."""

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for text in texts:
            yield wire.Delta(text=text, num_tokens=1)
        await asyncio.Event().wait()

    return script


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """Serves Exchange; counts what it is asked."""

    def __init__(self, worker_id: str, script: Script) -> None:
        self.worker_id = worker_id
        self.script = script
        self.requests: list[wire.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.running: dict[str, asyncio.Task[None]] = {}
        self.most_running = 0
        self.changed = asyncio.Event()
        self.is_mute = False
        """Answers no question, like a machine that lost its network."""
        self.port = 0
        self._server: Any = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def kill(self) -> None:
        """Breaks all streams at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        """Waits for something the worker sees."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[wire.WorkerFrame]:
        out: asyncio.Queue[wire.Delta] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, out))
        try:
            while True:
                deltas = [await out.get()]
                while not out.empty():
                    deltas.append(out.get_nowait())
                yield wire.WorkerFrame(epoch="e1", deltas=deltas)
        finally:
            tasks = [reader, *self.running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.changed.set()

    async def Describe(self, request: wire.DescribeRequest, context: Any) -> wire.DescribeReply:
        if self.is_mute:
            await asyncio.Event().wait()
        return wire.DescribeReply(worker_id=self.worker_id)

    async def _read(self, frames: Any, out: asyncio.Queue[wire.Delta]) -> None:
        async for frame in frames:
            for request in frame.generate:
                self.requests.append(request)
                task = asyncio.create_task(self._generate(request, out))
                self.running[request.request_id] = task
                self.most_running = max(self.most_running, len(self.running))
            for request_id in frame.cancel:
                self.cancelled.append(request_id)
                if request_id in self.running:
                    self.running[request_id].cancel()
            self.changed.set()

    async def _generate(self, request: wire.GenerateRequest, out: asyncio.Queue[wire.Delta]) -> None:
        try:
            async for delta in self.script(request):
                delta.request_id = request.request_id
                out.put_nowait(delta)
                await asyncio.sleep(0)
        finally:
            del self.running[request.request_id]
            self.changed.set()
