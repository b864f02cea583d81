"""Steps of a whole model that generate: how long they take, and how much of that is not the GPU's work. For `gpu`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.gpu_limits import Limits
from bench.gpu_report import DecodeResult
from bench.stats import median

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "worker" / "support"))

from batches import Lane, batch_of
from memory_models import MemoryCheckpoint, config_of
from sampling_batches import greedy_batch

from naru_operator.core.roofline.formats import WEIGHTS
from naru_operator.core.roofline.gpus import GPUS
from naru_operator.core.roofline.models import MODELS, Model
from naru_operator.core.roofline.prediction import decode_time
from naru_worker.adapters.ops.cuda.runner import CudaRunner
from naru_worker.adapters.ops.protocol import RawTensor, Runner, RunnerOptions
from naru_worker.core.model_config import ModelConfig, RopeConfig
from naru_worker.core.weight_layout import expected_shapes

MODEL = "llama-3.2-1b"
BATCHES = (1, 16, 64)
CONTEXT = 1024
WARM_UPS, STEPS = 5, 50
BLOCK_SIZE = 16
_TILE = 1 << 20
_ROPE_THETA = 500_000.0


def random_model(model: Model, num_positions: int) -> MemoryCheckpoint:
    """A model of that shape in bfloat16, the same few numbers over and over: which they are costs no time."""
    config = _config(model, num_positions)
    values = np.random.default_rng(0).standard_normal(_TILE).astype(np.float32) * np.float32(0.02)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    checkpoint = MemoryCheckpoint(config)
    for name, shape in expected_shapes(config).items():
        flat = np.resize(halves, int(np.prod(shape))) if len(shape) == 2 else np.ones(shape, np.float32)
        kind = "bf16" if len(shape) == 2 else "f32"
        checkpoint.tensors[name] = RawTensor(name, kind, shape, memoryview(flat.tobytes()))  # type: ignore[arg-type]
    return checkpoint


def options_for(batches: Sequence[int], context: int) -> RunnerOptions:
    """Room for the largest batch."""
    num_blocks = 1 + max(batches) * -(-context // BLOCK_SIZE)
    return RunnerOptions(BLOCK_SIZE, num_blocks, max(*batches, context), max(batches), context)


def decode_results(
    runner: Runner, model: Model, limits: Limits, batches: Sequence[int], context: int, is_late: Callable[[], bool]
) -> Iterator[DecodeResult]:
    """A result for each batch: the same step again and again, one launched before the last one's tokens are read.

    A runner that cannot do so waits for each.
    """
    # What the sheets say is replaced by what was measured, so that the roof is this GPU's.
    gpu = replace(GPUS["h100"], bandwidth=limits.bandwidth, flops_16=limits.flops_16, flops_8=limits.flops_8)
    for batch in batches:
        if is_late():
            return
        step = step_of(runner, model.shape.vocab_size, batch, context)
        for _ in range(WARM_UPS):
            step()
        roof = decode_time(model, WEIGHTS["bf16"], "float16", gpu, batch=batch, context=context)
        yield DecodeResult(model.name, batch, context, _wall_s(step), _kernel_s(step), roof.kernel_s)


def step_of(runner: Runner, vocab_size: int, batch: int, context: int) -> Callable[[], object]:
    """A step that gives one token to each of `batch` sequences of `context` tokens, and reads the step before it."""
    each = -(-context // BLOCK_SIZE)
    ids = np.random.default_rng(1).integers(0, vocab_size, context).tolist()
    lanes = [
        Lane(ids, list(range(1 + i * each, 1 + (i + 1) * each)), num_prompt_tokens=context - 1) for i in range(batch)
    ]
    for lane in lanes:
        # What lies in the cache before is no numbers, perhaps.
        runner.run(batch_of([(lane, context - 1)], BLOCK_SIZE), greedy_batch(1, vocab_size))
        lane.num_computed = context - 1
    inputs = batch_of([(lane, 1) for lane in lanes], BLOCK_SIZE)
    sampling = greedy_batch(batch, vocab_size)
    if not isinstance(runner, CudaRunner):
        return lambda: runner.run(inputs, sampling)
    waiting = [runner.launch(inputs, sampling)]

    def step() -> object:
        waiting.append(runner.launch(inputs, sampling))
        return runner.fetch(waiting.pop(0))

    return step


def _wall_s(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _kernel_s(step: Callable[[], object]) -> float:
    """Seconds of a step in which the GPU computes, by the profiler; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    steps = WARM_UPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    # Launches on the CPU's side may carry their kernels' time, too.
    kernels = [event for event in profile.key_averages() if event.device_type.name == "CUDA"]
    return sum(_device_us(event) for event in kernels) * 1e-6 / steps


def _device_us(event: Any) -> float:
    # The name before torch 2.4.
    names = ("self_device_time_total", "self_cuda_time_total")
    return next((float(getattr(event, name)) for name in names if hasattr(event, name)), 0.0)


def _config(model: Model, num_positions: int) -> ModelConfig:
    shape = model.shape
    return config_of(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=num_positions,
        tie_word_embeddings=shape.is_head_tied,
        qkv_bias=shape.has_qkv_bias,
        rope=RopeConfig(theta=_ROPE_THETA, rotary_dim=shape.head_dim),
    )


__all__ = ["BATCHES", "CONTEXT", "MODEL", "MODELS", "decode_results", "options_for", "random_model", "step_of"]
