"""What one more model costs a worker: the difference between what two loaded models and one have booked.

Called by `hub`, which makes its budgets from it. So a budget "for ten models" is in the worker's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.hub_memory import booked_bytes
from bench.hub_models import ModelCopy
from bench.hub_worker import HubWorker, HubWorkerError, Place, WorkerLimits

from naru_proto.v1 import worker_pb2

PROBE_BUDGET_BYTES = 4 * 10**9
"""Room for two models and whatever a worker keeps besides."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes of equal models without requests."""

    per_model_bytes: int
    """Weights, KV floor and all else that comes with each model."""
    shared_bytes: int
    """What is there once, however many models are loaded: the workspace."""
    weight_bytes: int
    kv_floor_bytes: int
    image_bytes: int
    """Of one packed image."""

    def budget_bytes(self, num_models: int) -> int:
        """Room for so many loaded models, and not for one more."""
        return num_models * self.per_model_bytes + self.shared_bytes


def probe(place: Place, models: Sequence[ModelCopy]) -> Probe:
    """Loads two of the models.

    Raises:
        HubWorkerError: a load failed, or the bookings make no sense.
    """
    with HubWorker(WorkerLimits(PROBE_BUDGET_BYTES), place, "probe") as worker:
        seen = []
        for model in models[:2]:
            worker.bring(model, worker_pb2.TIER_ACTIVE)
            seen.append(worker.memory())
    return difference(*seen)


def difference(one: worker_pb2.MemoryStats, two: worker_pb2.MemoryStats) -> Probe:
    """From the numbers with one model and with two.

    Raises:
        HubWorkerError: the second model seems to cost nothing, or more than both together.
    """
    per_model = booked_bytes(two) - booked_bytes(one)
    shared = booked_bytes(one) - per_model
    if per_model <= 0 or shared < 0:
        raise HubWorkerError(
            f"the worker has booked {booked_bytes(one)} bytes for one model and {booked_bytes(two)} for two equal "
            "ones; no budget can be made from that"
        )
    return Probe(
        per_model_bytes=per_model,
        shared_bytes=shared,
        weight_bytes=two.weight_bytes - one.weight_bytes,
        kv_floor_bytes=two.kv_bytes - one.kv_bytes,
        image_bytes=two.image_bytes // 2,
    )
