"""The `cuda` backend: models on one NVIDIA GPU, by Triton kernels and cuBLAS.

Loaded by name like any backend (`load_runner`, `runner_bytes`, `kv_block_bytes`).
Under ``TRITON_INTERPRET=1`` the same code computes on the CPU, slowly and in float32: that is how it is tested without
a GPU.

Where weights are quantized in groups, a token's result depends on its kind (prompt or generated) and on its sequence
alone; products with 16-bit weights, and of 8-bit floats on both sides, are cuBLAS's, whose order of additions may
change with the number of rows. Routers and experts add in an order of their own, whatever their weights are: they
never change an answer by who is in the batch.
"""

from __future__ import annotations

from naru_worker.adapters.models.decoder import load_weights
from naru_worker.adapters.ops.cuda import sizes
from naru_worker.adapters.ops.cuda.checkpoint_weights import WeightSizer
from naru_worker.adapters.ops.cuda.device import GpuDevice, open_gpu
from naru_worker.adapters.ops.cuda.interpreter import is_interpreted
from naru_worker.adapters.ops.cuda.kv_views import block_bytes, element_type
from naru_worker.adapters.ops.cuda.runner import CudaRunner
from naru_worker.adapters.ops.cuda.warm_up import warm_up
from naru_worker.adapters.ops.protocol import KVConfig, RunnerBytes, RunnerOptions
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.adapters.weights.watched_checkpoint import OnShare, watched
from naru_worker.core.model_config import ModelConfig

__all__ = ["CudaRunner", "kv_block_bytes", "load_runner", "runner_bytes", "weight_bytes"]


def load_runner(checkpoint: Checkpoint, options: RunnerOptions, on_share: OnShare | None = None) -> CudaRunner:
    """Packs the weights on the CPU, puts them on the GPU, matrix by matrix, allocates the KV cache, compiles kernels.

    Raises:
        LoadError: there is no GPU to use, a tensor does not fit the config, or the GPU has no room.
        Unavailable: it has none for the KV cache, or for what steps need.
        Exception: whatever `on_share` raises, which is told of each tensor.
    """
    runner = CudaRunner(open_gpu(), watched(checkpoint, on_share), options, weight_bytes(checkpoint))
    if is_interpreted():  # there is nothing to compile, and steps are slow
        return runner
    try:
        warm_up(runner, options, checkpoint.config.vocab_size)
    except BaseException:
        runner.close()
        raise
    runner.plain_steps.clear()
    return runner


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the weights on the GPU.

    Raises:
        LoadError: there is no GPU to use, or a tensor does not fit the config.
    """
    return _sized(open_gpu(), checkpoint).num_bytes


def kv_block_bytes(config: ModelConfig, options: RunnerOptions) -> int:
    """Bytes of one KV block over all layers.

    Raises:
        LoadError: there is no GPU to use.
    """
    return block_bytes(KVConfig.of(config, options), element_type(options.kv_format, open_gpu().activation_dtype))


def runner_bytes(checkpoint: Checkpoint, options: RunnerOptions) -> RunnerBytes:
    """Weights; about the activations of a step, which models share; graphs, sampler and what steps read: each model has
    its own, and keeps it while it sleeps.

    Raises:
        LoadError: there is no GPU to use, or a tensor does not fit the config.
    """
    gpu, config = open_gpu(), checkpoint.config
    sizer = _sized(gpu, checkpoint)
    return RunnerBytes(
        sizer.num_bytes,
        sizes.workspace_bytes(gpu, config, options, sizer.products),
        sizes.device_bytes(gpu, config, options, sizer.products),
    )


def _sized(gpu: GpuDevice, checkpoint: Checkpoint) -> WeightSizer:
    sizer = WeightSizer(gpu.activation_dtype, gpu.capability)
    load_weights(sizer, checkpoint)  # type: ignore[arg-type]  # only the weight half of the protocol is called
    return sizer
