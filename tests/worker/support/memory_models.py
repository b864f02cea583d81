"""Synthetic models in memory: random tensors of every format, and their float values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from float_codes import FLOATS, float_codes

from naru_worker.adapters.ops.protocol import RawTensor, TensorFormat
from naru_worker.core.model_config import ModelConfig, RopeConfig

Float64Array = npt.NDArray[np.float64]

BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q8_0": (32, 34),
    "q4_k": (256, 144),
    "q6_k": (256, 210),
}
HALVES: dict[str, tuple[int, ...]] = {"q4_0": (0,), "q4_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
"""Where a block holds half-precision numbers; all other bytes may be anything."""
SPREAD = {"q4_0": 0.02, "q4_1": 0.02, "q8_0": 0.001, "q4_k": 0.0002, "q6_k": 0.0001}
GROUPS: dict[str, tuple[int, int]] = {"q4_s64": (64, 2), "q4_s128": (128, 2), "q4_g64": (64, 4), "q4_g128": (128, 4)}
"""Columns and bytes of scale and minimum of a block of nibbles that GGUF does not know."""
FLOAT_BLOCKS = {"e4m3_row": 32, "e4m3_b32": 32, "e4m3_b128": 128}
"""Columns of a block of 8-bit floats."""


LEARNED: dict[str, Any] = {
    "architecture": "gpt2",
    "norm": "layer",
    "activation": "gelu_tanh",
    "rope": None,
    "tie_word_embeddings": True,
    "num_kv_heads": 4,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "max_position_embeddings": 256,
}
"""What makes a small GPT-2 of the small Llama of `config_of`."""


def random_tensor(
    name: str, tensor_format: TensorFormat, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 1.0
) -> tuple[RawTensor, Float64Array]:
    """A tensor of random blocks and its values, decoded with the gguf package."""
    if tensor_format in BLOCKS:
        return _decoded(random_blocks(name, tensor_format, shape, rng, scale))
    if tensor_format in GROUPS:
        return _random_groups(name, tensor_format, shape, rng, scale)
    if tensor_format in FLOAT_BLOCKS:
        return _random_floats(name, tensor_format, shape, rng, scale)
    values = (rng.standard_normal(shape) * 0.2 * scale).astype(np.float32)
    if tensor_format == "f16":
        halves = values.astype(np.float16)
        return RawTensor(name, "f16", shape, memoryview(halves.tobytes())), halves.astype(np.float64)
    if tensor_format == "bf16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        exact = (bits.astype(np.uint32) << 16).view(np.float32)
        return RawTensor(name, "bf16", shape, memoryview(bits.tobytes())), exact.astype(np.float64)
    return RawTensor(name, "f32", shape, memoryview(values.tobytes())), values.astype(np.float64)


def random_blocks(
    name: str, tensor_format: TensorFormat, shape: tuple[int, ...], rng: np.random.Generator, scale: float = 1.0
) -> RawTensor:
    """A tensor of random blocks of a quantized format."""
    elements, size = BLOCKS[tensor_format]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in HALVES[tensor_format]:
        halves = (rng.standard_normal(blocks.shape[:2]) * SPREAD[tensor_format] * scale).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    if tensor_format in ("q4_1", "q4_k"):
        # Minima that centre the values, as in real files; q4_k subtracts them.
        d = blocks[..., 0:2].copy().view(np.float16)
        blocks[..., 2:4] = (d * np.float16(-7.5 if tensor_format == "q4_1" else 7.5)).view(np.uint8)
    return RawTensor(name, tensor_format, shape, memoryview(blocks.tobytes()))


def _decoded(tensor: RawTensor) -> tuple[RawTensor, Float64Array]:
    import gguf  # the benchmark of a GPU, which decodes nothing here, does without

    raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    kind = gguf.GGMLQuantizationType[tensor.format.upper()]
    return tensor, gguf.quants.dequantize(raw, kind).astype(np.float64)


def _random_groups(
    name: str, tensor_format: TensorFormat, shape: tuple[int, ...], rng: np.random.Generator, scale: float
) -> tuple[RawTensor, Float64Array]:
    columns, head = GROUPS[tensor_format]
    integers = rng.integers(0, 16, (shape[0], shape[1] // columns, columns))
    scales = (rng.standard_normal(integers.shape[:2]) * 0.02 * scale).astype(np.float16)[..., None]
    minimums = scales * np.float16(-7.5)
    nibbles = integers[..., : columns // 2] | (integers[..., columns // 2 :] << 4)
    heads = [scales.view(np.uint8)] + ([minimums.view(np.uint8)] if head == 4 else [])
    raw = np.concatenate([*heads, nibbles.astype(np.uint8)], axis=2)
    least = minimums.astype(np.float64) if head == 4 else -8 * scales.astype(np.float64)
    values = (integers * scales.astype(np.float64) + least).reshape(shape)
    return RawTensor(name, tensor_format, shape, memoryview(raw.tobytes())), values


def _random_floats(
    name: str, tensor_format: TensorFormat, shape: tuple[int, ...], rng: np.random.Generator, scale: float
) -> tuple[RawTensor, Float64Array]:
    columns = FLOAT_BLOCKS[tensor_format]
    codes = float_codes(rng.standard_normal((shape[0], shape[1] // columns, columns)) * 100)
    scales = (rng.uniform(0.5, 2, codes.shape[:2]) * 0.002 * scale).astype(np.float32)[..., None]
    if tensor_format == "e4m3_row":
        scales = np.repeat(scales[:, :1], codes.shape[1], axis=1)
    raw = np.concatenate([scales.view(np.uint8), codes], axis=2)
    values = (FLOATS[codes] * scales.astype(np.float64)).reshape(shape)
    return RawTensor(name, tensor_format, shape, memoryview(raw.tobytes())), values


@dataclass
class MemoryCheckpoint:
    """A checkpoint made of tensors in memory."""

    config: ModelConfig
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    values: dict[str, Float64Array] = field(default_factory=dict)
    chat_template: str = ""
    revision: str = "memory"

    def get(self, name: str) -> RawTensor:
        return self.tensors[name]

    def has(self, name: str) -> bool:
        return name in self.tensors

    def close(self) -> None:
        self.tensors.clear()


def config_of(**changes: Any) -> ModelConfig:
    """A small Llama; `changes` are laid over it."""
    base: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "norm": "rms",
        "norm_eps": 1e-5,
        "activation": "swiglu",
        "rope": RopeConfig(theta=10000.0, rotary_dim=16),
        "tie_word_embeddings": False,
    }
    merged = base | changes
    if "rope" not in changes:
        merged["rope"] = RopeConfig(theta=10000.0, rotary_dim=merged["head_dim"])
    return ModelConfig(**merged)


def checkpoint_of(
    config: ModelConfig, formats: dict[str, TensorFormat] | None = None, default: TensorFormat = "f32", seed: int = 0
) -> MemoryCheckpoint:
    """Random weights for a config. `formats` maps the last part of a tensor's name to its format."""
    rng = np.random.default_rng(seed)
    checkpoint = MemoryCheckpoint(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def add(name: str, shape: tuple[int, ...]) -> None:
        last = name.rsplit(".", 1)[-1]
        kind: TensorFormat = (formats or {}).get(last, default) if len(shape) == 2 and last != "router" else "f32"
        tensor, values = random_tensor(name, kind, shape, rng)
        if name.endswith("norm"):
            values = np.abs(values) + 0.5
            tensor = RawTensor(name, "f32", shape, memoryview(values.astype(np.float32).tobytes()))
            values = values.astype(np.float32).astype(np.float64)
        checkpoint.tensors[name], checkpoint.values[name] = tensor, values

    add("embed", (config.vocab_size, hidden))
    if config.rope is None:
        add("pos_embed", (config.max_position_embeddings, hidden))
    if not config.tie_word_embeddings:
        add("lm_head", (config.vocab_size, hidden))
    norm_names = ["final_norm"] + [
        f"layers.{i}.{n}" for i in range(config.num_layers) for n in ("attn_norm", "mlp_norm")
    ]
    for name in norm_names:
        add(name, (hidden,))
        if config.norm == "layer":
            add(f"{name}_bias", (hidden,))
    for i in range(config.num_layers):
        shapes = {
            "q": (q_rows, hidden),
            "k": (kv_rows, hidden),
            "v": (kv_rows, hidden),
            "o": (hidden, q_rows),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        if config.activation == "swiglu":
            shapes["gate"] = (inner, hidden)
        experts = config.experts
        if experts is not None and i in experts.layers:
            plain = [name for name in ("up", "down", "gate") if shapes.pop(name)]
            each = {f"experts.{e}": experts.inner_size for e in range(experts.num_experts)}
            for group, size in (each | ({"shared": experts.shared_size} if experts.shared_size else {})).items():
                for name in plain:
                    shapes[f"{group}.{name}"] = (hidden, size) if name == "down" else (size, hidden)
            add(f"layers.{i}.router", (experts.num_experts, hidden))
            if experts.shared_size:
                add(f"layers.{i}.shared_router", (hidden,))
        for part in ("q_norm", "k_norm") if config.qk_norm else ():
            add(f"layers.{i}.{part}", (config.head_dim,))
        for name, shape in shapes.items():
            add(f"layers.{i}.{name}", shape)
            has_bias = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
            if has_bias.get(name, config.mlp_bias):
                add(f"layers.{i}.{name}_bias", (shape[0],))
    return checkpoint
