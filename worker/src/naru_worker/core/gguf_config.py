"""GGUF metadata to `ModelConfig`.

Called when a GGUF file is opened. Pure: takes the metadata, the tensors' shapes and the frequency table, reads no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from naru_worker.core.expert_fields import read_gguf_experts
from naru_worker.core.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    Fields,
)
from naru_worker.core.model_config import Architecture, ModelConfig, RopeConfig
from naru_worker.core.rope import yarn_attention_factor
from naru_worker.core.rope_scaling import MAX_FACTOR, MAX_THETA, RopeReading

GgufArchitecture = Literal["llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gpt2"]

SUPPORTED_ARCHITECTURES: tuple[GgufArchitecture, ...] = get_args(GgufArchitecture)

END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>")
"""Control tokens that end an answer. GGUF metadata has room for one or two of what generation configs list, so these
are taken by name too."""

CONTROL_TOKEN = 3
"""Value of tokenizer.ggml.token_type for control tokens."""


def parse_gguf_config(
    fields: Fields, shapes: Mapping[str, tuple[int, ...]], freq_factors: tuple[float, ...] = ()
) -> ModelConfig:
    """The model's shape. `shapes` are (rows, columns) by the file's tensor names.

    Raises:
        LoadError: unknown architecture or feature, or a field missing, of the wrong type or out of range.
    """
    arch = fields.text("general.architecture", "")
    for known in SUPPORTED_ARCHITECTURES:
        if arch == known:
            return _parse(fields, known, shapes, freq_factors)
    fields.fail(
        "general.architecture",
        f"is {arch!r}; supported are {', '.join(SUPPORTED_ARCHITECTURES)} (encoders are read from safetensors only)",
    )


def _parse(
    fields: Fields, arch: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]], freq_factors: tuple[float, ...]
) -> ModelConfig:
    hidden_size = fields.integer(f"{arch}.embedding_length", 1, MAX_HIDDEN_SIZE)
    num_heads = _per_layer(fields, f"{arch}.attention.head_count", MAX_HEADS)
    num_kv_heads = _per_layer(fields, f"{arch}.attention.head_count_kv", MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        fields.fail(f"{arch}.attention.head_count_kv", f"is {num_kv_heads}; it must divide head_count {num_heads}")
    head_dim = _head_dim(fields, arch, hidden_size, num_heads)
    num_layers = fields.integer(f"{arch}.block_count", 1, MAX_LAYERS)
    positions = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
    is_gpt2 = arch == "gpt2"
    rope = None if is_gpt2 else _rope(fields, arch, head_dim, positions, freq_factors)
    norm_key = "layer_norm_epsilon" if is_gpt2 else "layer_norm_rms_epsilon"
    experts = read_gguf_experts(fields, arch, num_layers)
    architecture: Architecture = "mixtral" if arch == "llama" and experts else arch
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, shapes),
        hidden_size=hidden_size,
        # No layer has a plain MLP where experts are, and some files leave its size out.
        intermediate_size=_per_layer(
            fields, f"{arch}.feed_forward_length", MAX_INTERMEDIATE_SIZE, experts.inner_size if experts else None
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions if rope else positions,
        norm="layer" if is_gpt2 else "rms",
        norm_eps=fields.number(f"{arch}.attention.{norm_key}", 1e-12, 1.0),
        activation="gelu_tanh" if is_gpt2 else "swiglu",
        rope=rope.rope if rope else None,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias=arch in ("qwen2", "gpt2") or "blk.0.attn_q.bias" in shapes,
        o_bias=is_gpt2 or "blk.0.attn_output.bias" in shapes,
        mlp_bias=is_gpt2 or "blk.0.ffn_up.bias" in shapes,
        sliding_windows=_sliding_windows(fields, arch, num_layers),
        bos_token_id=_bos(fields),
        eos_token_ids=_eos(fields),
        qk_norm=arch in ("qwen3", "qwen3moe"),
        experts=experts,
    )


def _per_layer(fields: Fields, name: str, high: int, default: int | None = None) -> int:
    """A number, or a list of one number per layer that are all the same."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return fields.integer(name, 1, high, default)
    if not value or any(item != value[0] for item in value):
        fields.fail(name, "differs by layer; layers of one shape are supported")
    return Fields(fields.file, {name: value[0]}).integer(name, 1, high)


def _head_dim(fields: Fields, arch: str, hidden_size: int, num_heads: int) -> int:
    key = f"{arch}.attention.key_length"
    if not fields.has(key) and hidden_size % num_heads:
        fields.fail(
            f"{arch}.embedding_length", f"is {hidden_size}; without key_length {num_heads} heads must divide it"
        )
    head_dim = fields.integer(key, 2, MAX_HEAD_DIM, hidden_size // num_heads)
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        fields.fail(key, f"is {head_dim}; it must be even, in [2, {MAX_HEAD_DIM}]")
    value_length = fields.integer(f"{arch}.attention.value_length", 1, MAX_HEAD_DIM, head_dim)
    if value_length != head_dim:
        fields.fail(f"{arch}.attention.value_length", f"is {value_length}; it must equal the key length {head_dim}")
    usual = 1.0 / math.sqrt(head_dim)
    scale = fields.number(f"{arch}.attention.scale", 0.0, 1e6, usual)
    if scale not in (0.0, usual) and abs(scale - usual) > 1e-6:
        fields.fail(f"{arch}.attention.scale", f"is {scale}; only 1 / sqrt(head size) is supported")
    return head_dim


def _vocab_size(fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding: the metadata's own number may be absent or stale."""
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        fields.fail("token_embd.weight", f"has shape {shape}; a matrix (vocabulary, hidden size) is needed")
    if not 1 <= shape[0] <= MAX_VOCAB_SIZE:
        fields.fail("token_embd.weight", f"has {shape[0]} rows; 1 to {MAX_VOCAB_SIZE} are allowed")
    return shape[0]


def _rope(fields: Fields, arch: str, head_dim: int, positions: int, freq_factors: tuple[float, ...]) -> RopeReading:
    dimensions = fields.integer(f"{arch}.rope.dimension_count", 1, MAX_HEAD_DIM, head_dim)
    if dimensions != head_dim:
        fields.fail(f"{arch}.rope.dimension_count", f"is {dimensions}; it must equal the head size {head_dim}")
    if freq_factors and len(freq_factors) != head_dim // 2:
        fields.fail("rope_freqs.weight", f"has {len(freq_factors)} values; {head_dim // 2} are needed")
    if any(not (math.isfinite(f) and f > 0.0) for f in freq_factors):
        fields.fail("rope_freqs.weight", "holds a value that is not a positive number")
    theta = fields.number(f"{arch}.rope.freq_base", 1.0 + 1e-6, MAX_THETA, 10_000.0)
    prefix = f"{arch}.rope.scaling"
    kind = fields.text(f"{prefix}.type", "none")
    legacy = fields.number(f"{arch}.rope.scale_linear", 0.0, MAX_FACTOR, 1.0)
    if kind == "none" and legacy > 1.0:
        return RopeReading(RopeConfig(theta, head_dim, "linear", legacy, freq_factors=freq_factors), positions)
    if kind == "none":
        return RopeReading(RopeConfig(theta, head_dim, freq_factors=freq_factors), positions)
    # 0 stands for "not scaled" in some files.
    factor = max(fields.number(f"{prefix}.factor", 0.0, MAX_FACTOR), 1.0)
    if kind == "linear":
        return RopeReading(RopeConfig(theta, head_dim, "linear", factor, freq_factors=freq_factors), positions)
    if kind == "yarn":
        return _yarn(fields, prefix, RopeConfig(theta, head_dim, "yarn", factor, freq_factors=freq_factors), positions)
    fields.fail(f"{prefix}.type", f"is {kind!r}; supported are none, linear, yarn")


def _yarn(fields: Fields, prefix: str, base: RopeConfig, positions: int) -> RopeReading:
    original = fields.integer(f"{prefix}.original_context_length", 1, MAX_POSITIONS, positions)
    # GGUF stores what is to be multiplied with YaRN's own magnitude, not the product.
    weight = fields.number(f"{prefix}.attn_factor", 1e-3, 100.0, 1.0)
    rope = RopeConfig(
        theta=base.theta,
        rotary_dim=base.rotary_dim,
        kind="yarn",
        factor=base.factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number(f"{prefix}.yarn_beta_fast", 1e-3, 1e4, 32.0),
        beta_slow=fields.number(f"{prefix}.yarn_beta_slow", 1e-3, 1e4, 1.0),
        attention_factor=weight * yarn_attention_factor(base.factor),
        freq_factors=base.freq_factors,
    )
    return RopeReading(rope, min(int(original * base.factor), MAX_POSITIONS))


def _sliding_windows(fields: Fields, arch: str, num_layers: int) -> tuple[int | None, ...]:
    pattern = f"{arch}.attention.sliding_window_pattern"
    if fields.has(pattern):
        fields.fail(pattern, "is set; windows that differ by layer are not supported in GGUF files")
    window = fields.integer(f"{arch}.attention.sliding_window", 0, MAX_POSITIONS, 0)
    return (window,) * num_layers if window else ()


def _bos(fields: Fields) -> int | None:
    ids = fields.token_ids("tokenizer.ggml.bos_token_id")
    return min(ids) if ids else None


def _eos(fields: Fields) -> tuple[int, ...]:
    found: set[int] = set()
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        found |= fields.token_ids(f"tokenizer.ggml.{key}")
    tokens = fields.values.get("tokenizer.ggml.tokens")
    types = fields.values.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        # Control tokens are few; `index` scans at C speed where a loop over the vocabulary would not.
        for name in END_OF_TURN_TOKENS:
            if name in tokens:
                token_id = tokens.index(name)
                if types[token_id] == CONTROL_TOKEN:
                    found.add(token_id)
    return tuple(sorted(found))
