"""What the metrics show of this worker at one instant. Called in the asyncio thread, at a scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from naru_worker.adapters import machine
from naru_worker.adapters.engine.hub import ModelHub
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.metrics import GpuSample, ModelSample, WorkerSample
from naru_worker.adapters.server import describe

if TYPE_CHECKING:
    from naru_worker.adapters.ops.cuda.memory.pinned_pool import PinnedPool


async def sample_worker(
    hub: ModelHub, loop: EngineLoop, *, is_serving: bool, gpu: GpuSample | None = None
) -> WorkerSample:
    """Numbers of the worker and of its models in memory."""
    models = [
        ModelSample(
            model.name,
            model.engine.stats,
            await describe.kv_stats(loop, model),
            None if model.device_stats is None else model.device_stats(),
            _steps_ahead(model),
        )
        for model in hub.models()
    ]
    memory = describe.memory_message(hub, 0.0, 0.0)
    asleep_bytes = hub.operations.bookings.asleep_bytes
    return WorkerSample(
        models,
        machine.rss_bytes(),
        is_serving,
        memory_bytes={
            "weights": memory.weight_bytes,
            "kv": memory.kv_bytes,
            "workspace": memory.workspace_bytes,
            "private": memory.private_bytes - asleep_bytes,
            "asleep": asleep_bytes,
            "unreturned": memory.unreturned_bytes,
            "host": memory.host_bytes,
        },
        budget_bytes=memory.budget_bytes,
        num_known_models=memory.num_known_models,
        num_loads=memory.num_loads,
        num_evictions=memory.num_evictions,
        num_failed_loads=memory.num_failed_loads,
        gpu=gpu,
    )


def _steps_ahead(model: LoadedModel) -> dict[str, int]:
    from naru_worker.adapters.engine.engine import ModelEngine

    engine = model.engine
    return engine.steps_ahead.reasons if isinstance(engine, ModelEngine) and engine.steps_ahead is not None else {}


def sample_gpu(sleep_slots: PinnedPool | None) -> GpuSample:
    """Numbers of the GPU that this worker has, and of pinned memory of the host."""
    from naru_worker.adapters.ops.cuda.device import open_gpu_memory

    pool = open_gpu_memory().pool
    num_taken = 0 if sleep_slots is None else sleep_slots.num_taken
    return GpuSample(
        pool_bytes={"held": 0, "idle": 0} if pool is None else {"held": pool.held_bytes, "idle": pool.idle_bytes},
        pinned_slots={"taken": num_taken, "free": 0 if sleep_slots is None else sleep_slots.num_slots - num_taken},
        sleeping_bytes=0 if sleep_slots is None else num_taken * sleep_slots.slot_bytes,
    )
