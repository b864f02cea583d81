"""A worker whose models leave the GPU, wait in host memory and come back, under Triton's interpreter."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.device_memory import DeviceMemory

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
pytest.importorskip("torch")
pytest.importorskip("triton")

from disk_worker import started  # noqa: E402
from mapped_host import MappedHost, map_host  # noqa: E402
from tiny_models import TinySpec  # noqa: E402
from toy_worker import DEADLINE_S, RunningWorker, ask, ids, toy_settings  # noqa: E402
from worker_probes import scrape  # noqa: E402

from naru_proto.v1 import worker_pb2  # noqa: E402
from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool  # noqa: E402
from naru_worker.app import WorkerApp  # noqa: E402
from naru_worker.core.residency import ModelState  # noqa: E402
from naru_worker.settings import EngineSettings, MemorySettings  # noqa: E402

SLOT_BYTES = 1 << 16


class Gpu:
    """The device of a test, and the pinned memory of its worker."""

    def __init__(self, host: MappedHost, memory: DeviceMemory) -> None:
        self.host = host
        assert memory.pool is not None
        self.chunks = memory.pool


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr("naru_worker.adapters.ops.cuda.device.SLOT_BYTES", SLOT_BYTES)
    host = MappedHost()
    return Gpu(host, map_host(monkeypatch, host))


def gpu_worker(home: Path, host_bytes: int = 4 << 20) -> AbstractAsyncContextManager[RunningWorker]:
    return started(
        dataclasses.replace(
            toy_settings(home=str(home), metrics_listen="127.0.0.1:0"),
            engine=EngineSettings(backend="cuda", step_timeout_s=120.0, max_num_seqs=2, max_num_batched_tokens=64),
            memory=MemorySettings(memory_budget_bytes=2 << 30, host_budget_bytes=host_bytes, kv_cache_bytes=1 << 20),
        )
    )


def slots_of(app: WorkerApp) -> PinnedPool:
    pool: PinnedPool | None = app.sleep_slots
    assert pool is not None
    return pool


async def answer(worker: RunningWorker, name: str = "m") -> list[int]:
    deltas = await worker.generate(ask(f"r{worker.app.hub.num_loads}", "ab", model=name, max_tokens=3))
    assert not deltas[-1].error.code, deltas[-1].error
    return ids(deltas)


async def send_to(worker: RunningWorker, tier: Any, generation: int) -> None:
    await worker.stub.Unload(worker_pb2.UnloadRequest(model="m", generation=generation, tier=tier))


def state_of(worker: RunningWorker) -> ModelState:
    resident = worker.app.hub.resident("m")
    assert resident is not None
    return resident.state


async def test_a_model_sleeps_in_host_memory_and_wakes_without_its_files(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path, gpu: Gpu
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(TinySpec(num_layers=1)), folder)
    async with gpu_worker(tmp_path / "home") as worker:
        progress = await worker.load("m", f"file://{folder}", generation=1)
        assert progress[-1].state == worker_pb2.MODEL_STATE_READY, progress[-1]
        loading = [each for each in progress if each.state == worker_pb2.MODEL_STATE_LOADING]
        assert any(0 < each.bytes_done < each.bytes_total for each in loading), "a long load shows how far it is"
        hub, pool = worker.app.hub, slots_of(worker.app)
        expected = await answer(worker)
        booked, awake = hub.core.memory, await scrape(worker)
        assert awake["naru_worker_gpu_pool_bytes", (("state", "held"),)] == gpu.chunks.held_bytes > 0
        assert awake["naru_gpu_steps_total", (("graph", "off"), ("model", "m"))] == 3, "the interpreter has no graphs"
        assert awake["naru_gpu_graphs_stopped", (("model", "m"),)] == 1
        ahead = {labels: n for (name, labels), n in awake.items() if name == "naru_steps_ahead_total"}
        assert sum(ahead.values()) == 3 and ahead[("model", "m"), ("next", "prompts")] == 1
        await send_to(worker, worker_pb2.TIER_HOST, 2)
        assert state_of(worker) is ModelState.HOST
        ledger, memory = hub.operations.bookings.ledger.view(), hub.core.memory
        assert gpu.chunks.held_bytes == 0 and pool.num_taken > 0
        assert memory.weight_bytes == memory.kv_bytes == 0 and memory.host_bytes == booked.weight_bytes
        # What stays is booked: graphs, sampler, and the one workspace.
        assert ledger.used_bytes == memory.used_bytes == memory.private_bytes + memory.workspace_bytes
        assert 0 < memory.private_bytes < booked.private_bytes
        asleep = await scrape(worker)
        assert asleep["naru_worker_gpu_pool_bytes", (("state", "held"),)] == 0
        assert asleep["naru_worker_pinned_slots", (("state", "taken"),)] == pool.num_taken
        assert asleep["naru_worker_sleeping_bytes", ()] == pool.num_taken * SLOT_BYTES
        assert asleep["naru_worker_memory_bytes", (("kind", "asleep"),)] == memory.private_bytes
        shutil.rmtree(folder)
        again = await worker.load("m", f"file://{folder}", generation=3)
        assert again[-1].state == worker_pb2.MODEL_STATE_READY, again[-1]
        assert await answer(worker) == expected
        assert pool.num_taken == 0
        assert hub.core.memory.used_bytes == hub.operations.bookings.ledger.view().used_bytes
        await send_to(worker, worker_pb2.TIER_COLD, 4)
        assert state_of(worker) is ModelState.COLD
        assert (gpu.chunks.held_bytes, gpu.host.num_ranges, pool.num_taken) == (0, 0, 0)
        assert hub.core.memory.private_bytes == 0


async def test_where_memory_is_not_mapped_the_files_wait_and_nothing_stays_booked(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path
) -> None:
    folder = tiny_model(TinySpec(num_layers=1))
    async with gpu_worker(tmp_path) as worker:
        assert worker.app.sleep_slots is None
        await worker.load("m", f"file://{folder}", generation=1)
        expected = await answer(worker)
        await send_to(worker, worker_pb2.TIER_HOST, 2)
        memory = worker.app.hub.core.memory
        assert state_of(worker) is ModelState.HOST and memory.private_bytes == memory.weight_bytes == 0
        await worker.load("m", f"file://{folder}", generation=3)
        assert await answer(worker) == expected


async def test_weights_that_find_no_slot_leave_host_memory_for_good(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path, gpu: Gpu
) -> None:
    folder = tiny_model(TinySpec(num_layers=1))
    async with gpu_worker(tmp_path) as worker:
        await worker.load("m", f"file://{folder}", generation=1)
        expected = await answer(worker)
        pool = slots_of(worker.app)
        taken = pool.take(pool.num_slots)
        await send_to(worker, worker_pb2.TIER_HOST, 2)
        assert state_of(worker) is ModelState.COLD
        _, why = worker.app.hub.explain("m")
        assert any("pinned slots" in sentence for sentence in why), why
        memory = worker.app.hub.core.memory
        assert (gpu.chunks.held_bytes, gpu.host.num_ranges, memory.host_bytes, memory.private_bytes) == (0, 0, 0, 0)
        for slot in taken:
            pool.give_back(slot)
        await worker.load("m", f"file://{folder}", generation=3)
        assert await answer(worker) == expected


async def test_a_device_without_room_fails_the_load_and_the_weights_sleep_on(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path, gpu: Gpu
) -> None:
    folder = tiny_model(TinySpec(num_layers=1))
    async with gpu_worker(tmp_path) as worker:
        await worker.load("m", f"file://{folder}", generation=1)
        expected = await answer(worker)
        await send_to(worker, worker_pb2.TIER_HOST, 2)
        hub, pool = worker.app.hub, slots_of(worker.app)
        num_taken, before = pool.num_taken, hub.core.memory
        gpu.chunks.trim()
        gpu.host.capacity_bytes = 0  # another process has it all
        failed = await worker.load("m", f"file://{folder}", generation=3)
        assert failed[-1].state == worker_pb2.MODEL_STATE_FAILED
        assert "device memory" in failed[-1].error.message
        assert pool.num_taken == num_taken and gpu.chunks.held_bytes == 0
        after = hub.core.memory
        assert (after.used_bytes, after.host_bytes) == (before.used_bytes, before.host_bytes)
        assert hub.operations.bookings.ledger.view().used_bytes == after.used_bytes
        gpu.host.capacity_bytes = 1 << 30
        again = await worker.load("m", f"file://{folder}", generation=4)
        assert again[-1].state == worker_pb2.MODEL_STATE_READY, again[-1]
        assert await answer(worker) == expected


@pytest.mark.parametrize("moment", ["sleep", "wake"])
async def test_a_device_that_fails_ends_the_worker(
    moment: str, tiny_model: Callable[[TinySpec], Path], tmp_path: Path, gpu: Gpu
) -> None:
    folder = tiny_model(TinySpec(num_layers=1))
    async with gpu_worker(tmp_path) as worker:
        await worker.load("m", f"file://{folder}", generation=1)
        if moment == "wake":
            await send_to(worker, worker_pb2.TIER_HOST, 2)
        gpu.host.is_dead, gpu.host.fails_in = True, 1
        if moment == "wake":
            failed = await worker.load("m", f"file://{folder}", generation=3)
            assert failed[-1].state == worker_pb2.MODEL_STATE_FAILED
        else:
            call = asyncio.create_task(send_to(worker, worker_pb2.TIER_HOST, 2))
        async with asyncio.timeout(DEADLINE_S):
            await worker.app.stopping.wait()
        assert worker.app.exit_code == 1
        if moment == "sleep":
            call.cancel()


async def test_a_load_that_is_not_wanted_any_more_stops_between_two_tensors(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from naru_worker.adapters.engine.plain_model import PlainHosted

    aio, begun = asyncio.get_running_loop(), asyncio.Event()
    pause = PlainHosted._pause
    num_pauses = 0

    def counted(hosted: PlainHosted, should_stop: object) -> None:
        nonlocal num_pauses
        num_pauses += 1
        if num_pauses == 4:
            aio.call_soon_threadsafe(begun.set)
            assert hosted is not None and should_stop.wait(DEADLINE_S)  # type: ignore[attr-defined]
        pause(hosted, should_stop)  # type: ignore[arg-type]

    monkeypatch.setattr(PlainHosted, "_pause", counted)
    folder = tiny_model(TinySpec(num_layers=1))
    async with gpu_worker(tmp_path) as worker:
        load = asyncio.create_task(worker.load("m", f"file://{folder}", generation=1))
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
        assert gpu.chunks.held_bytes > 0
        await send_to(worker, worker_pb2.TIER_COLD, 2)
        await load
        assert state_of(worker) is ModelState.COLD
        assert (gpu.chunks.held_bytes, gpu.host.num_ranges) == (0, 0)
        assert worker.app.hub.core.memory.reserved_bytes == 0
