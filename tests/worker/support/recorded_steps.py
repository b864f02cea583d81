"""Steps of whole models whose launches are taken down instead of done, for GPUs that aren't here.

Run as a program, for kernels must not have been imported for the interpreter: `recorded_steps.py ARCH [--compile]`
prints, for each model, how many codes the steps of a warm-up need, those that later steps of other sizes need beside
them, and with ``--compile`` what is wrong with any of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from batches import Lane, batch_of
from memory_models import MemoryCheckpoint, checkpoint_of, config_of
from sampling_batches import sampling_batch

from naru_worker.adapters.models.decoder import forward, load_weights
from naru_worker.adapters.ops.cuda.checkpoint_weights import DeviceWeights
from naru_worker.adapters.ops.cuda.device import GpuDevice
from naru_worker.adapters.ops.cuda.figures import cases_of, compile_case, kernel_modules
from naru_worker.adapters.ops.cuda.judging import own_faults
from naru_worker.adapters.ops.cuda.kernels.compile_case import CompileCase
from naru_worker.adapters.ops.cuda.kernels.drawn_tokens import fill_drawn_tokens
from naru_worker.adapters.ops.cuda.kernels.sampler import SamplerSpace, sample
from naru_worker.adapters.ops.cuda.kv_views import block_bytes, element_type, layer_caches
from naru_worker.adapters.ops.cuda.launches import recorded_launches
from naru_worker.adapters.ops.cuda.ops import CudaOps
from naru_worker.adapters.ops.cuda.sampling_tensors import SamplingKinds, SamplingLayout, SamplingTensors, row_flags
from naru_worker.adapters.ops.cuda.staging import Staging
from naru_worker.adapters.ops.cuda.step_tensors import num_generated_sequences, step_arrays, step_tensors
from naru_worker.adapters.ops.cuda.streams import InlineStreams
from naru_worker.adapters.ops.cuda.table_twin import TableTwin
from naru_worker.adapters.ops.cuda.warm_up import STEPS
from naru_worker.adapters.ops.protocol import KVConfig, KVFormat
from naru_worker.core.model_config import ExpertsConfig, RopeConfig

BLOCK_SIZE = 16
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
LEARNED: dict[str, Any] = WIDE | {
    "architecture": "gpt2", "norm": "layer", "activation": "gelu_tanh", "rope": None, "tie_word_embeddings": True,
    "num_kv_heads": 8, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "max_position_embeddings": 512,
}  # fmt: skip

MIXTURE = ExpertsConfig(num_experts=8, num_chosen=2, inner_size=256, renormalizes=True, layers=(0, 1))
EXPERTS: dict[str, Any] = WIDE | {"experts": MIXTURE}

ASKED: dict[str, Any] = {
    "temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "num_logprobs": 5, "presence_penalty": 0.5,
    "bias": [(3, 1.0)], "penalties": [(5, 2)], "banned": [7], "mask": [1, 2, 3, 9],
}  # fmt: skip

Sizes = tuple[Sequence[int], Sequence[int]]
"""Tokens that each generating sequence has, and tokens of each prompt."""

LATER: list[Sizes] = [([], [1]), ([], [64]), ([17] * 16, []), ([301], [16, 7]), ([16] * 64, [128]), ([290] * 5, [3])]


def models() -> dict[str, tuple[MemoryCheckpoint, KVFormat]]:
    """What differs in kernels: formats of weights and cache, windows, biases, norms, positions."""
    return {
        "bf16": (checkpoint_of(config_of(**WIDE), default="bf16"), "f16"),
        "q4_k, cache of bytes": (checkpoint_of(config_of(**WIDE), {"v": "q6_k", "embed": "q8_0"}, "q4_k"), "int8"),
        "windows, half a head rotated": (
            checkpoint_of(
                config_of(**WIDE, sliding_windows=(64, None), rope=RopeConfig(theta=1e4, rotary_dim=32)), default="q4_0"
            ),
            "f16",
        ),
        "8-bit floats": (
            checkpoint_of(config_of(**WIDE), {"down": "e4m3_b128", "embed": "bf16", "lm_head": "bf16"}, "e4m3_row"),
            "f16",
        ),
        "8-bit floats behind activations": (
            checkpoint_of(config_of(**WIDE, num_layers=1), {"embed": "bf16", "lm_head": "bf16"}, "e4m3_row"),
            "f16",
        ),
        "groups of 64 and 128": (
            checkpoint_of(config_of(**WIDE), {"down": "q4_s64", "embed": "bf16", "lm_head": "bf16"}, "q4_g128"),
            "f16",
        ),
        "learned positions, biases": (checkpoint_of(config_of(**LEARNED), default="bf16"), "f16"),
        "experts, norms of heads": (
            checkpoint_of(config_of(**EXPERTS, architecture="qwen3moe", qk_norm=True), default="bf16"),
            "f16",
        ),
        "quantized experts, one shared": (
            checkpoint_of(
                config_of(**EXPERTS | {"experts": replace(MIXTURE, shared_size=512)}, architecture="qwen2moe"),
                {"down": "q8_0"},
                "q4_0",
            ),
            "f16",
        ),
    }


class RecordedModel:
    """A model on the CPU for a GPU of another kind. Its numbers mean nothing."""

    def __init__(self, checkpoint: MemoryCheckpoint, kv_format: KVFormat, arch: int) -> None:
        config = checkpoint.config
        gpu = GpuDevice(torch.device("cpu"), arch, "none", 0, False, divmod(arch, 10))
        kv = KVConfig(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, 1024)
        dtype = element_type(kv_format, gpu.activation_dtype)
        blocks = torch.zeros((kv.num_blocks, block_bytes(kv, dtype)), dtype=torch.uint8)
        self._config = config
        self._ops = CudaOps(gpu, kv, layer_caches(blocks, kv, dtype), 512)
        self._weights = load_weights(DeviceWeights(gpu), checkpoint)  # type: ignore[arg-type]
        self._staging = Staging(gpu.torch_device)
        self._table = TableTwin(gpu.torch_device, InlineStreams(), 128, 512, BLOCK_SIZE)
        self._drawn = torch.zeros(512, dtype=torch.int32)

    def step(self, sizes: Sizes) -> None:
        """One step of such sequences."""
        generating, prompts = sizes
        lanes, at = [], 1
        for length, is_prompt in [*((n, False) for n in generating), *((n, True) for n in prompts)]:
            held = -(-length // BLOCK_SIZE)
            computed = 0 if is_prompt else length - 1
            own = list(range(at, at + held))
            at += held
            lanes.append(
                (Lane([1] * length, own, computed, num_prompt_tokens=length if is_prompt else 1), length - computed)
            )
        batch = batch_of(lanes, BLOCK_SIZE)
        group = self._config.num_heads // self._config.num_kv_heads
        arrays = step_arrays(batch, self._table.take(batch, num_generated_sequences(batch)), group, BLOCK_SIZE)
        step = step_tensors(arrays, self._staging.put(arrays.arrays), self._table.tensor)
        if step.num_generated:
            fill_drawn_tokens(step.token_ids[: step.num_generated], self._drawn)
        self._ops.begin(step)
        with torch.inference_mode():
            logits = forward(self._ops, self._config, self._weights)  # type: ignore[arg-type]
        self._sample(logits)

    def _sample(self, logits: torch.Tensor) -> None:
        """Once the likeliest tokens, once all that may be asked for."""
        for row in ({"temperature": 0.0}, ASKED):
            batch = sampling_batch([row] * len(logits), self._config.vocab_size, max_logprobs=5)
            layout = SamplingLayout.of(batch)
            tensors = SamplingTensors.views(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
            space = SamplerSpace.make(len(logits), batch.vocab_limit, 5, "cpu")
            sample(logits, tensors, SamplingKinds.of(batch, row_flags(batch)), space)


def described(case: CompileCase) -> str:
    """What tells it from the other codes of its kernel."""
    own = {name: value for name, value in case.constexprs.items() if value is not None}
    return f"{case.kernel.__name__} {own} aligned {' '.join(case.aligned)}"


def promises(arch: int) -> dict[int, set[str]]:
    """Instructions that all cases of a kernel promise, by the kernel's id."""
    found: dict[int, set[str]] = {}
    for module in kernel_modules():
        for case in cases_of(module, arch):
            found[id(case.kernel)] = found.get(id(case.kernel), set(case.expects)) & set(case.expects)
    return found


def _faults(case: CompileCase, promised: dict[int, set[str]]) -> list[str]:
    case = replace(case, expects=tuple(promised.get(id(case.kernel), ())))
    return [f"{described(case)}: {fault}" for fault in own_faults(case, compile_case(case))]


def main(arch: int, *, compiles: bool) -> dict[str, Any]:
    """The report."""
    found, promised = {}, promises(arch)
    for name, (checkpoint, kv_format) in models().items():
        with recorded_launches(arch) as cases:
            model = RecordedModel(checkpoint, kv_format, arch)
            for warm in STEPS:
                model.step(warm)
            first = len(cases)
            for sizes in LATER:
                model.step(sizes)
        faults = [fault for case in cases for fault in _faults(case, promised)] if compiles else []
        found[name] = {"first": first, "later": [described(case) for case in cases[first:]], "faults": faults}
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), compiles="--compile" in sys.argv), indent=1))
