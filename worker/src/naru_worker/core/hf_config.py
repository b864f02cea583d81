"""Hugging Face's config.json to `ModelConfig`.

Called when a checkpoint folder is opened. Pure: the caller reads the files. Follows the reference implementation's
defaults where a key is absent, and refuses what the decoder would compute wrongly.
"""

from __future__ import annotations

from typing import get_args

from naru_worker.core.encoder_config import ENCODER_MODEL_TYPES
from naru_worker.core.expert_fields import read_hf_experts
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
from naru_worker.core.model_config import Activation, Architecture, ModelConfig
from naru_worker.core.rope_scaling import read_hf_rope

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gpt2")
_ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
_ABSENT_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen3": 32}
"""What the references have where the key is absent; null means one per head everywhere."""
_ABSENT_HEAD_DIM = {"qwen3": 128}
"""Likewise; others divide the hidden size by the number of heads."""

GELU_KINDS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}

assert set(GELU_KINDS.values()) < set(get_args(Activation))


def parse_hf_config(fields: Fields, eos_token_ids: frozenset[int] = frozenset()) -> ModelConfig:
    """The model's shape; `eos_token_ids` from other files are joined with the config's own.

    Raises:
        LoadError: unknown architecture or feature, or a field missing, of the wrong type or out of range.
    """
    model_type = fields.text("model_type", "")
    if model_type not in SUPPORTED_MODEL_TYPES:
        fields.fail(
            "model_type",
            f"is {model_type!r}; supported are {', '.join(SUPPORTED_MODEL_TYPES)}, and the encoders "
            f"{', '.join(ENCODER_MODEL_TYPES)}",
        )
    eos = tuple(sorted(eos_token_ids | fields.token_ids("eos_token_id")))
    if model_type == "gpt2":
        return _parse_gpt2(fields, eos)
    return _parse_llama_like(fields, model_type, eos)


def _parse_llama_like(fields: Fields, model_type: str, eos: tuple[int, ...]) -> ModelConfig:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.fail("hidden_act", f"is {activation!r}; {model_type} models with silu are supported")
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = num_heads if "num_key_value_heads" in fields.values else _ABSENT_KV_HEADS.get(model_type, num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, kv_heads)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN_SIZE)
    head_dim = _head_dim(fields, model_type, hidden_size, num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", f"is {num_kv_heads}; it must divide num_attention_heads {num_heads}")
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    has_bias = fields.boolean("attention_bias", False) if model_type in ("llama", "qwen3", "qwen3_moe") else False
    qkv_bias = fields.boolean("qkv_bias", True) if model_type == "qwen2_moe" else has_bias or model_type == "qwen2"
    positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = read_hf_rope(fields, head_dim, positions, 1e6 if model_type == "mixtral" else 1e4)
    return ModelConfig(
        architecture=_ARCHITECTURES.get(model_type, "llama"),
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        norm="rms",
        norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        activation="swiglu",
        rope=rope.rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if model_type == "llama" else False,
        sliding_windows=_sliding_windows(fields, model_type, num_layers),
        bos_token_id=_bos(fields),
        eos_token_ids=eos,
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        experts=read_hf_experts(fields, model_type, num_layers) if model_type in _WITH_EXPERTS else None,
    )


def _head_dim(fields: Fields, model_type: str, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim") or model_type in _ABSENT_HEAD_DIM:
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, _ABSENT_HEAD_DIM.get(model_type))
    elif hidden_size % num_heads:
        fields.fail("hidden_size", f"is {hidden_size}; without head_dim it must be a multiple of {num_heads} heads")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        fields.fail("head_dim", f"is {head_dim}; it must be even and at most {MAX_HEAD_DIM}")
    return head_dim


def _sliding_windows(fields: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """Window per layer; empty when every layer sees everything."""
    if model_type not in ("mistral", "mixtral", "qwen2", "qwen3"):
        return ()
    is_qwen = model_type in ("qwen2", "qwen3")
    if is_qwen and not fields.boolean("use_sliding_window", False):
        return ()
    if model_type == "mixtral" and not fields.has("sliding_window"):
        return ()
    # The reference reads an absent key as 4096 and null as full attention.
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return ()
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, 4096)
    layer_types = fields.values.get("layer_types")
    if layer_types is not None:
        kinds = {"sliding_attention": window, "full_attention": None}
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            fields.fail("layer_types", f"must be a list of {num_layers} names")
        if any(not isinstance(kind, str) or kind not in kinds for kind in layer_types):
            fields.fail("layer_types", f"holds a kind other than {', '.join(kinds)}")
        return tuple(kinds[str(kind)] for kind in layer_types)
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28) if is_qwen else 0
    return tuple(window if i >= first else None for i in range(num_layers))


def _parse_gpt2(fields: Fields, eos: tuple[int, ...]) -> ModelConfig:
    name = fields.text("activation_function", "gelu_new")
    if name not in GELU_KINDS:
        fields.fail("activation_function", f"is {name!r}; supported are {', '.join(GELU_KINDS)}")
    for flag, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if fields.boolean(flag, needed) is not needed:
            fields.fail(flag, f"is {not needed}; only {needed} is supported")
    hidden_size = fields.integer("n_embd", 1, MAX_HIDDEN_SIZE)
    num_heads = fields.integer("n_head", 1, MAX_HEADS)
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_DIM:
        fields.fail("n_embd", f"is {hidden_size}; it must be n_head ({num_heads}) times at most {MAX_HEAD_DIM}")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 1, MAX_INTERMEDIATE_SIZE, 4 * hidden_size),
        num_layers=fields.integer("n_layer", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=fields.integer("n_positions", 1, MAX_POSITIONS),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-12, 1.0, 1e-5),
        activation=GELU_KINDS[name],
        rope=None,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        bos_token_id=_bos(fields),
        eos_token_ids=eos,
    )


def _bos(fields: Fields) -> int | None:
    ids = fields.token_ids("bos_token_id")
    return min(ids) if ids else None
