"""A worker that speaks naru.v1.Worker and says what the test tells it to."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from naru_proto.errors import NaruError
from naru_proto.names import METADATA_ERROR_CODE
from naru_proto.v1 import inference_pb2 as inf
from naru_proto.v1 import worker_pb2 as wire
from naru_proto.v1 import worker_pb2_grpc

STOP = inf.FINISH_REASON_STOP
LENGTH = inf.FINISH_REASON_LENGTH
_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 * 1024 * 1024)]
Script = Callable[[wire.GenerateRequest], AsyncIterator[wire.Delta]]
MoveScript = Callable[[wire.MoveRequest], Awaitable[wire.MoveReply]]


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
        self.moves: list[wire.MoveRequest] = []
        self.on_move: MoveScript | None = None
        """Answers moves, or raises one of our errors; None: the command is not known."""
        self.running: dict[str, asyncio.Task[None]] = {}
        self.most_running = 0
        self.changed = asyncio.Event()
        self.is_mute = False
        """Answers no question, like a machine that lost its network."""
        self.port = 0
        self._server: Any = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=_OPTIONS)
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
        tasks: set[asyncio.Task[None]] = set()  # of this stream: others belong to other routers
        tasks.add(asyncio.create_task(self._read(request_iterator, out, tasks)))
        try:
            while True:
                deltas = [await out.get()]
                while not out.empty():
                    deltas.append(out.get_nowait())
                yield wire.WorkerFrame(epoch="e1", deltas=deltas)
        finally:
            ending = tuple(tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            self.changed.set()

    async def Move(self, request: wire.MoveRequest, context: Any) -> wire.MoveReply:
        self.moves.append(request)
        self.changed.set()
        if self.on_move is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not known")
        try:
            assert self.on_move is not None
            return await self.on_move(request)
        except NaruError as error:
            context.set_trailing_metadata(((METADATA_ERROR_CODE, error.code),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise

    async def Describe(self, request: wire.DescribeRequest, context: Any) -> wire.DescribeReply:
        if self.is_mute:
            await asyncio.Event().wait()
        return wire.DescribeReply(worker_id=self.worker_id)

    async def _read(self, frames: Any, out: asyncio.Queue[wire.Delta], tasks: set[asyncio.Task[None]]) -> None:
        async for frame in frames:
            for request in frame.generate:
                self.requests.append(request)
                task = asyncio.create_task(self._generate(request, out))
                self.running[request.request_id] = task
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                # Also of one that is cancelled before its first step.
                task.add_done_callback(functools.partial(self._ended, request.request_id))
                self.most_running = max(self.most_running, len(self.running))
            for request_id in frame.cancel:
                self.cancelled.append(request_id)
                if request_id in self.running:
                    self.running[request_id].cancel()
            self.changed.set()

    async def _generate(self, request: wire.GenerateRequest, out: asyncio.Queue[wire.Delta]) -> None:
        async for delta in self.script(request):
            delta.request_id = request.request_id
            out.put_nowait(delta)
            await asyncio.sleep(0)

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        self.running.pop(request_id, None)
        self.changed.set()
