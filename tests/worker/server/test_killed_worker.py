"""kill -9 while models are packed, loaded and unloaded: what is on disk stays whole, and the next worker serves on."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tiny_models import TinySpec
from toy_worker import ask, ids
from worker_process import WorkerProcess, worker_process

from naru_proto.v1 import worker_pb2
from naru_worker.adapters.images.store import ImageStore

TinyModel = Callable[[TinySpec], Path]
NUM_MODELS = 4
NUM_KILLS = 4


async def know(worker: WorkerProcess, folders: list[Path]) -> None:
    for index, folder in enumerate(folders):
        request = worker_pb2.LoadRequest(
            model=f"m{index}",
            uri=f"file://{folder}",
            tier=worker_pb2.TIER_COLD,
            options=worker_pb2.EngineOptions(max_model_len=128, kv_cache_bytes=2**20, max_num_batched_tokens=64),
        )
        async for _ in worker.stub.Load(request):
            pass


async def answer(worker: WorkerProcess, index: int, request_id: str) -> list[int]:
    deltas = [d async for d in worker.stub.Generate(ask(request_id, model=f"m{index}", max_tokens=4))]
    assert not deltas[-1].error.code, deltas[-1].error
    return ids(deltas)


async def churn(worker: WorkerProcess) -> None:
    """Requests that keep models coming and going, until the worker is gone."""
    count = 0
    try:
        while True:
            await asyncio.gather(*(answer(worker, i, f"c{count}-{i}") for i in range(NUM_MODELS)))
            count += 1
    except grpc.aio.AioRpcError:
        return


@pytest.mark.parametrize("seed", [1])
async def test_after_each_kill_images_are_whole_and_every_model_answers_as_before(
    tiny_model: TinyModel, tmp_path: Path, seed: int
) -> None:
    folders = [tiny_model(TinySpec(seed=i, num_layers=4)) for i in range(NUM_MODELS)]
    flags = ("--image-dir", str(tmp_path), "--memory-budget-bytes", str(24 * 10**6), "--host-budget-bytes", "0")
    rng = random.Random(seed)
    answers: list[list[int]] = []
    for kill in range(NUM_KILLS):
        async with worker_process(*flags) as worker:
            await know(worker, folders)
            churning = asyncio.create_task(churn(worker))
            # Early kills meet packing, late ones loading and unloading: no moment is special.
            await asyncio.sleep(rng.uniform(0.05, 0.4) * (kill + 1))
            worker.signal(signal.SIGKILL)
            await worker.exit_code()
            await churning
    async with worker_process(*flags) as worker:
        await know(worker, folders)
        for turn in range(3):
            told = [await answer(worker, i, f"{turn}-{i}") for i in range(NUM_MODELS)]
            answers = answers or told
            assert told == answers
        stats = await worker.stub.Stats(worker_pb2.StatsRequest())
        assert stats.memory.num_evictions >= NUM_MODELS, "the budget holds fewer than all of them"
        assert stats.memory.num_failed_loads == 0
    assert len({tuple(a) for a in answers}) == NUM_MODELS
    check_images(tmp_path)


def check_images(folder: Path) -> None:
    """All are whole, and nothing else is left."""
    store = ImageStore(folder, 2**30)
    assert store.num_images() == NUM_MODELS
    for path in folder.glob("*.naru"):
        image = store.open(path)
        image.make_present(lambda num_bytes: None, verify=True, should_stop=threading.Event())
        image.close()
    assert not list(folder.rglob("*.partial"))
