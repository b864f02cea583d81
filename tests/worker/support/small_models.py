"""A worker with memory for few small models, and what tests ask of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toy_worker import RunningWorker, ToyLoader, ask, text, toy_settings
from worker_probes import described

from naru_proto.v1 import inference_pb2, worker_pb2
from naru_worker.settings import MemorySettings, ResidencySettings, WorkerSettings

MODEL_BYTES = 1000 + 17 * 100
LENGTH = inference_pb2.FINISH_REASON_LENGTH


def small_loader(**more: Any) -> ToyLoader:
    """Models of MODEL_BYTES."""
    return ToyLoader(num_blocks=17, max_model_len=48, **more)


def room_for(num_models: float, *, host_models: int = 0, **residency: Any) -> WorkerSettings:
    """A worker with memory for so many small models."""
    return replace(
        toy_settings(),
        memory=MemorySettings(
            memory_budget_bytes=int(num_models * MODEL_BYTES),
            host_budget_bytes=host_models * 1000,
            high_watermark=1.0,
            low_watermark=1.0,
        ),
        residency=ResidencySettings(**{"load_guard": 0.0, "fair_wait_s": 0.05, **residency}),
    )


async def know(worker: RunningWorker, *models: str, **request: Any) -> None:
    """Tells the worker models without having them loaded; each has a URI of its own."""
    for name in models:
        progress = await worker.load(name, f"toy://{name}", tier=worker_pb2.TIER_COLD, **request)
        assert [p.state for p in progress] == [worker_pb2.MODEL_STATE_COLD]


async def generated(worker: RunningWorker, name: str, request_id: str, **sampling: Any) -> str:
    """The text of one request, which must end well."""
    deltas = await worker.generate(ask(request_id, model=name, **sampling))
    assert deltas[-1].finish_reason == LENGTH, deltas[-1]
    return text(deltas)


def loaded(worker: RunningWorker) -> set[str]:
    return set(worker.app.hub.models_by_name())


async def memory(worker: RunningWorker) -> worker_pb2.MemoryStats:
    found: worker_pb2.MemoryStats = (await worker.stub.Stats(worker_pb2.StatsRequest())).memory
    booked = found.weight_bytes + found.kv_bytes + found.workspace_bytes + found.private_bytes + found.unreturned_bytes
    assert booked <= found.budget_bytes
    return found


async def is_in_state(worker: RunningWorker, name: str, state: int) -> bool:
    model = await described(worker, name)
    return model is not None and model.state == state
