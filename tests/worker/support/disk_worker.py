"""A worker in this process that loads real files: real loader, real gRPC on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from toy_worker import DEADLINE_S, RunningWorker, ToyLoader, toy_settings

from naru_proto.v1 import worker_pb2, worker_pb2_grpc
from naru_worker.adapters.engine.batch_engine import BatchEngine
from naru_worker.app import build
from naru_worker.settings import ImageSettings, MemorySettings, WorkerSettings


def disk_worker(
    home: Path, budget_bytes: int = 2**30, **server: Any
) -> contextlib.AbstractAsyncContextManager[RunningWorker]:
    """A started worker with a connected client; ended afterwards."""
    return started(
        dataclasses.replace(
            toy_settings(home=str(home), **server),
            memory=MemorySettings(memory_budget_bytes=budget_bytes, host_budget_bytes=0),
            images=ImageSettings(image_budget_bytes=0),
        )
    )


@contextlib.asynccontextmanager
async def started(settings: WorkerSettings) -> AsyncIterator[RunningWorker]:
    """A worker with its own loader, and a client; ended afterwards."""
    app = build(settings)
    await app.start()
    try:
        async with grpc.aio.insecure_channel(app.address) as channel:
            yield RunningWorker(app, ToyLoader(), channel, worker_pb2_grpc.WorkerStub(channel))
    finally:
        async with asyncio.timeout(DEADLINE_S):
            await app.shut_down()


async def load_ready(worker: RunningWorker, name: str, path: Path, **options: Any) -> None:
    """Loads a model from a folder or file; it must come up."""
    progress = await worker.load(name, f"file://{path}", options=worker_pb2.EngineOptions(**options))
    assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]


async def load_error(worker: RunningWorker, path: Path, **options: Any) -> worker_pb2.Error:
    """Why a model does not load."""
    progress = await worker.load(f"bad {path.name}", f"file://{path}", options=worker_pb2.EngineOptions(**options))
    assert progress[-1].state == worker_pb2.MODEL_STATE_FAILED, progress[-1]
    return progress[-1].error


def batch_engine(worker: RunningWorker, name: str) -> BatchEngine:
    """The engine of a loaded model that does not generate."""
    engine = worker.app.hub.models_by_name()[name].engine
    assert isinstance(engine, BatchEngine)
    return engine
