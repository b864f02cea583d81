"""How long the steps of a model take at best on a GPU, and how much of it that is.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from naru_operator.core.roofline.formats import Weights, kv_token_bytes
from naru_operator.core.roofline.gpus import Gpu
from naru_operator.core.roofline.kernels import step_work
from naru_operator.core.roofline.models import Model
from naru_operator.core.roofline.work import Step, Work
from naru_proto.errors import InvalidRequest
from naru_proto.shapes import matrices, num_vector_weights

LAUNCH_S = 1e-6
"""Between the end of a kernel and the start of the next one in a CUDA graph: an assumption, not a measurement."""
USABLE = 0.9
"""Part of a GPU's memory for weights and KV cache; the rest is for activations, graphs and the driver."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel of a step on a GPU."""

    work: Work
    seconds: float
    bound: Literal["memory", "compute"]
    """Which limit it meets."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step on a GPU."""

    kernels: tuple[KernelTime, ...]
    kernel_s: float
    launch_s: float
    num_tokens: int
    mbu: float
    """Part of the memory's bandwidth that is used over the whole step, launches included."""
    mfu: float
    """Part of the operations a second on 16 bits. FP8 may pass 1."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.kernel_s + self.launch_s

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, if one such step follows another."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Fit:
    """A model's memory on a GPU, in bytes."""

    weight_bytes: int
    kv_token_bytes: int
    """Of one token over all layers."""
    usable_bytes: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache has room for; 0 where not even the weights have."""
        return max(self.usable_bytes - self.weight_bytes, 0) // self.kv_token_bytes


def fit(model: Model, weights: Weights, kv: str, gpu: Gpu) -> Fit:
    """What the model takes of the GPU's memory.

    Raises:
        InvalidRequest: the KV format is not known.
    """
    shape = model.shape
    per_layer = kv_token_bytes(shape.num_kv_heads, shape.head_dim, kv)
    return Fit(gpu_weight_bytes(model, weights), shape.num_layers * per_layer, int(USABLE * gpu.memory_bytes))


def gpu_weight_bytes(model: Model, weights: Weights) -> int:
    """Bytes of the weights in a GPU's memory: norms, biases and routers have 16 bits."""
    shape = model.shape
    layers = sum(count * weights.matrices.matrix_bytes(rows, columns) for count, rows, columns in matrices(shape))
    tables = 1 if shape.is_head_tied else 2
    small = 2 * (num_vector_weights(shape) + shape.num_learned_positions * shape.hidden_size)
    return layers + tables * weights.tables.matrix_bytes(shape.vocab_size, shape.hidden_size) + small


def active_weight_bytes(model: Model, weights: Weights) -> int:
    """Of these the bytes that one token meets: all but the experts that it does not go through."""
    shape, form = model.shape, weights.matrices
    expert = form.matrix_bytes(2 * shape.expert_size, shape.hidden_size)
    expert += form.matrix_bytes(shape.hidden_size, shape.expert_size)
    num_left_out = shape.num_expert_layers * (shape.num_experts - shape.num_chosen_experts)
    return gpu_weight_bytes(model, weights) - num_left_out * expert


def decode_time(
    model: Model, weights: Weights, kv: str, gpu: Gpu, *, batch: int, context: int, launch_s: float = LAUNCH_S
) -> StepTime:
    """A step that gives one token to each of `batch` sequences of `context` tokens, the new one among them.

    Raises:
        InvalidRequest: a number is not positive or above the model's context, or the KV format is not known.
    """
    _check(model, batch=batch, context=context)
    return step_time(model, weights, kv, gpu, Step(batch, 1, context - 1), launch_s)


def prefill_time(
    model: Model, weights: Weights, kv: str, gpu: Gpu, *, prompt: int, launch_s: float = LAUNCH_S
) -> StepTime:
    """A step that computes a prompt of `prompt` tokens at once, of which none is cached.

    Raises:
        InvalidRequest: the number is not positive or above the model's context, or the KV format is not known.
    """
    _check(model, prompt=prompt)
    return step_time(model, weights, kv, gpu, Step(1, prompt, 0), launch_s)


def step_time(model: Model, weights: Weights, kv: str, gpu: Gpu, step: Step, launch_s: float = LAUNCH_S) -> StepTime:
    """Any step: each kernel as long as the limit that it meets first.

    Raises:
        InvalidRequest: the KV format is not known.
    """
    kernels = tuple(_kernel_time(work, gpu) for work in step_work(model, weights, kv, step))
    kernel_s = sum(kernel.seconds for kernel in kernels)
    launches = launch_s * sum(kernel.work.launches for kernel in kernels)
    seconds = kernel_s + launches
    return StepTime(
        kernels=kernels,
        kernel_s=kernel_s,
        launch_s=launches,
        num_tokens=step.num_tokens,
        mbu=sum(kernel.work.bytes for kernel in kernels) / (seconds * gpu.bandwidth),
        mfu=sum(kernel.work.operations for kernel in kernels) / (seconds * gpu.flops_16),
    )


def _kernel_time(work: Work, gpu: Gpu) -> KernelTime:
    flops = gpu.flops_8 if work.is_fp8 and gpu.flops_8 else gpu.flops_16
    moving, computing = work.bytes / gpu.bandwidth, work.operations / flops
    return KernelTime(work, max(moving, computing), "compute" if computing > moving else "memory")


def _check(model: Model, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InvalidRequest(f"{name} is {count}: it must be at least 1", param=name)
        if name != "batch" and count > model.max_context:
            raise InvalidRequest(
                f"{name} {count} is above what {model.name} was made for, {model.max_context} tokens: ask for less",
                param=name,
            )
