"""The real `naru-worker` as a process, and a client to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from naru_proto.v1 import worker_pb2_grpc

START_TIMEOUT_S = 90.0
"""The kernels may have to be compiled first."""


@dataclass
class WorkerProcess:
    """A process that has said it is ready."""

    process: asyncio.subprocess.Process
    address: str
    lines: list[str]
    channel: grpc.aio.Channel
    stub: Any

    async def line(self, word: str) -> str:
        """The next line of output with a word in it."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                text = (await self.process.stdout.readline()).decode()
                assert text, f"the process ended before it said {word!r}"
                self.lines.append(text)
                if word in text:
                    return text

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await self.process.wait()


async def spawn(*flags: str) -> asyncio.subprocess.Process:
    """Starts `naru-worker` without waiting for it."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "naru_worker",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith("NARU_WORKER_")},
    )


@contextlib.asynccontextmanager
async def worker_process(*flags: str) -> AsyncIterator[WorkerProcess]:
    """A started worker on free ports, killed at the end if it lives. Images are its own, unless a flag says where."""
    if "--image-dir" not in flags:
        with tempfile.TemporaryDirectory() as images:
            async with worker_process("--image-dir", images, *flags) as worker:
                yield worker
        return
    process = await spawn("--listen", "127.0.0.1:0", "--metrics-listen", "off", *flags)
    worker = WorkerProcess(process, "", [], grpc.aio.insecure_channel("127.0.0.1:1"), None)
    try:
        ready = await worker.line("ready")
        await worker.channel.close(None)
        worker.address = ready.partition("grpc ")[2].split(",")[0].strip()
        worker.channel = grpc.aio.insecure_channel(worker.address)
        worker.stub = worker_pb2_grpc.WorkerStub(worker.channel)
        yield worker
    finally:
        await worker.channel.close(None)
        if process.returncode is None:
            process.kill()
        await process.communicate()
