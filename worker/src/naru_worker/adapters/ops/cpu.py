"""The `cpu` backend: models as native weights, native KV caches and recorded tapes, all on one device per process.

Loaded by name like any backend (`load_runner`, `runner_bytes`, `kv_block_bytes`). Imports no torch.

A token's result depends on its kind (prompt or generated) and on its sequence alone, bit for bit: batch mates, chunks,
the number of threads, other models and a cached prefix of prompt tokens change nothing. The two kinds take different
ways, since prompts come in many rows: on `amx` prompts meet quantized weights, and a half-precision cache, as bf16 and
generated tokens as bytes; elsewhere only the order of attention's sums differs. Hence the one limit: tokens that an
earlier answer left in the cache keep the numbers they were generated with when a later prompt reuses them.
"""

from __future__ import annotations

import ctypes

from naru_worker.adapters.models.decoder import load_weights
from naru_worker.adapters.ops import cpu_sizes
from naru_worker.adapters.ops.cpu_device import CpuDevice, open_device
from naru_worker.adapters.ops.cpu_pack import WeightSizer, check_served
from naru_worker.adapters.ops.cpu_runner import CpuRunner
from naru_worker.adapters.ops.cpu_sizes import kv_block_bytes
from naru_worker.adapters.ops.native_lib import best_isa, load_best, load_variant
from naru_worker.adapters.ops.protocol import RunnerBytes, RunnerOptions
from naru_worker.adapters.ops.weights_image import WeightsImage
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare, watched
from naru_worker.core.model_config import ModelConfig

__all__ = [
    "CpuDevice",
    "CpuRunner",
    "isa",
    "kv_block_bytes",
    "load_image_runner",
    "load_runner",
    "open_device",
    "runner_bytes",
    "weight_bytes",
    "workspace_bytes",
]

_MAX_WAIT_S = 0.03


def isa() -> str:
    """The instruction set in use, for status and logs.

    Raises:
        LoadError: the kernels cannot be built, or the environment forces a variant that cannot run here.
    """
    return best_isa()


def load_runner(
    checkpoint: Checkpoint, options: RunnerOptions, variant: str | None = None, *, on_share: OnShare | None = None
) -> CpuRunner:
    """Packs the weights, reserves the KV cache, records the tape. The checkpoint may be closed afterwards.

    `variant` picks an instruction set by name, for tests; None takes the best.

    Raises:
        LoadError: a tensor does not fit the config, an option is out of range, or there is not enough memory.
        Exception: whatever `on_share` raises, which is told of each tensor.
    """
    check_served(checkpoint.config)
    device = open_device(options.num_threads, variant)
    sizer = _sized(device.library, checkpoint)
    runner = CpuRunner(
        device, checkpoint.config, options, sizer.arena_bytes + sizer.vector_bytes, packed_bytes=sizer.arena_bytes
    )
    runner.pack(watched(checkpoint, on_share))
    return runner


def load_image_runner(
    image: WeightsImage,
    options: RunnerOptions,
    *,
    ready_bytes: int | None = None,
    variant: str | None = None,
    max_wait_s: float = _MAX_WAIT_S,
) -> CpuRunner:
    """A runner that reads its weights where the image has them: milliseconds, nothing is copied or even touched.

    The image stays mapped until the runner is closed. With `ready_bytes` only so many bytes of it are present yet:
    steps wait for the others, at most `max_wait_s` each, as `CpuRunner.set_ready_bytes` tells of them.

    Raises:
        LoadError: what the image says does not fit its config or its size, an option is out of range, or there is not
            enough memory.
    """
    device = open_device(options.num_threads, variant)
    runner = CpuRunner(device, image.config, options, image.num_bytes, packed_bytes=0)
    runner.point_at(image, ready_bytes, max_wait_s)
    return runner


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the packed weights.

    Raises:
        LoadError: a tensor does not fit the config, or the kernels cannot be built.
    """
    check_served(checkpoint.config)
    sizer = _sized(load_best(), checkpoint)
    return sizer.arena_bytes + sizer.vector_bytes


def runner_bytes(checkpoint: Checkpoint, options: RunnerOptions) -> RunnerBytes:
    """Weights and workspace; raises as these do."""
    return RunnerBytes(weight_bytes(checkpoint), workspace_bytes(checkpoint.config, options))


def workspace_bytes(config: ModelConfig, options: RunnerOptions, *, variant: str | None = None) -> int:
    """Bytes of the workspace that a step of this model uses. All models share one: the largest counts.

    Raises:
        LoadError: a size is out of range, or the kernels cannot be built.
    """
    check_served(config)
    return cpu_sizes.workspace_bytes(load_best() if variant is None else load_variant(variant), config, options)


def _sized(library: ctypes.CDLL, checkpoint: Checkpoint) -> WeightSizer:
    sizer = WeightSizer(library)
    load_weights(sizer, checkpoint)  # type: ignore[arg-type]  # only the weight half of the protocol is called
    return sizer
