"""First tokens of models that are not loaded: from a packed image on the page cache, and from host memory.

Called by `hub`. Each model is asked once for each figure, by a worker that does nothing else; the answer's beginning is
taken at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.hub_models import ModelCopy, read_through
from bench.hub_worker import HubWorker, Place, WorkerLimits
from bench.stats import median, percentile

from naru_proto.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Seconds from sending a request to its first token; over models, each one time."""

    first_token_p50_s: float
    """Of models that this process has had before, and let go: what a switch costs."""
    first_token_p99_s: float
    first_token_max_s: float
    first_time_p50_s: float
    """Of models that this process loads for the first time: their index is still to be read."""
    first_token_new_process_s: float
    """The first model a new process loads: its tokenizer is not in memory yet, which copies of a model then share."""
    host_tier_p50_s: float
    host_tier_p99_s: float
    host_tier_max_s: float
    resident_p50_s: float
    """The same request to a model that is loaded: what is left is no loading."""
    pack_p50_s: float
    """To host memory from the GGUF file, packing its image."""
    num_samples: int
    image_bytes: int
    """Of all images packed here."""
    first_token_s: tuple[float, ...]
    host_tier_s: tuple[float, ...]


def measure_latency(
    limits: WorkerLimits, place: Place, models: Sequence[ModelCopy], progress: Callable[[str], None]
) -> LatencyFigures:
    """One worker packs the images and ends; a new one, which has seen no model, is measured.

    The first of `models` only warms the new process; at least two are needed.

    Raises:
        HubWorkerError: a load or a request failed.
    """
    with HubWorker(limits, place, "packing") as worker:
        pack_s, image_bytes = _pack(worker, models, progress)
    read_through(place.images)
    with HubWorker(limits, place, "latency") as worker:
        worker.know(models)
        first, *others = models
        new_process_s = worker.first_token_s(first)
        worker.send_down(first)
        first_time_s: list[float] = []
        from_image_s: list[float] = []
        resident_s = []
        for taken_s, which in ((first_time_s, "for the first time"), (from_image_s, "again")):
            for number, model in enumerate(others, 1):
                worker.expect(model, worker_pb2.MODEL_STATE_COLD)
                taken_s.append(worker.first_token_s(model))
                resident_s.append(worker.first_token_s(model))
                worker.send_down(model)
                progress(f"first token from image, {which}: {number}/{len(others)}, {1000 * taken_s[-1]:.0f} ms")
        from_host_s = []
        for number, model in enumerate(others, 1):
            worker.bring(model, worker_pb2.TIER_HOST)
            worker.expect(model, worker_pb2.MODEL_STATE_HOST)
            from_host_s.append(worker.first_token_s(model))
            worker.send_down(model)
            progress(f"first token from host memory: {number}/{len(others)}, {1000 * from_host_s[-1]:.0f} ms")
    return LatencyFigures(
        first_token_p50_s=median(from_image_s),
        first_token_p99_s=percentile(from_image_s, 99),
        first_token_max_s=max(from_image_s),
        first_time_p50_s=median(first_time_s),
        first_token_new_process_s=new_process_s,
        host_tier_p50_s=median(from_host_s),
        host_tier_p99_s=percentile(from_host_s, 99),
        host_tier_max_s=max(from_host_s),
        resident_p50_s=median(resident_s),
        pack_p50_s=median(pack_s),
        num_samples=len(others),
        image_bytes=image_bytes,
        first_token_s=tuple(from_image_s),
        host_tier_s=tuple(from_host_s),
    )


def _pack(worker: HubWorker, models: Sequence[ModelCopy], progress: Callable[[str], None]) -> tuple[list[float], int]:
    """Seconds each model took, and the bytes of all images."""
    seconds = []
    for number, model in enumerate(models, 1):
        seconds.append(worker.bring(model, worker_pb2.TIER_HOST))
        worker.send_down(model)
        progress(f"packed {number}/{len(models)}, {seconds[-1]:.2f} s")
    return seconds, worker.memory().image_bytes
