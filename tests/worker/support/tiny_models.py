"""Tiny random models in Hugging Face's layout, written with numpy alone.

Names and shapes are spelt out here on their own, so that a mistake in the engine's tables does not hide itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Weights = dict[str, npt.NDArray[np.float32]]

END_OF_TEXT, IM_START, IM_END = 256, 257, 258
"""Ids of the special tokens; ids below are the bytes in the order of the byte alphabet."""
NUM_TOKENS = 259

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinySpec:
    """What to write. `extra` is laid over config.json."""

    model_type: str = "llama"
    vocab_size: int = NUM_TOKENS
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    max_positions: int = 256
    tied: bool = False
    bias: bool = False
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Size of one head."""
        return self.head_dim or self.hidden_size // self.num_heads


def config_of(spec: TinySpec) -> dict[str, Any]:
    """The config.json."""
    if spec.model_type == "gpt2":
        config: dict[str, Any] = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": spec.vocab_size,
            "n_embd": spec.hidden_size,
            "n_inner": spec.intermediate_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_heads,
            "n_positions": spec.max_positions,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
        }
    else:
        name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[spec.model_type]
        config = {
            "architectures": [f"{name}ForCausalLM"],
            "model_type": spec.model_type,
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "max_position_embeddings": spec.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
        }
        if spec.head_dim is not None or spec.model_type == "qwen3":
            config["head_dim"] = spec.width
        if spec.model_type == "mistral":
            config["sliding_window"] = None
        if spec.model_type == "llama":
            config |= {"attention_bias": spec.bias, "mlp_bias": spec.bias}
        if spec.model_type == "qwen3":
            config["attention_bias"] = spec.bias
    config |= {"tie_word_embeddings": spec.tied, "bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    return config | spec.extra


def weights_of(spec: TinySpec) -> Weights:
    """Random float32 weights under Hugging Face's names, large enough that logits differ clearly."""
    rng = np.random.default_rng(spec.seed)

    def matrix(rows: int, columns: int, fan_in: int) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = (rng.standard_normal((rows, columns)) / np.sqrt(fan_in)).astype(np.float32)
        return values

    def vector(size: int, middle: float) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = (middle + 0.2 * rng.standard_normal(size)).astype(np.float32)
        return values

    return _gpt2(spec, matrix, vector) if spec.model_type == "gpt2" else _llama(spec, matrix, vector)


def _llama(spec: TinySpec, matrix: Any, vector: Any) -> Weights:
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.width
    q, kv = spec.num_heads * width, spec.num_kv_heads * width
    weights: Weights = {"model.embed_tokens.weight": matrix(spec.vocab_size, hidden, 1)}
    for i in range(spec.num_layers):
        p = f"model.layers.{i}."
        weights[p + "input_layernorm.weight"] = vector(hidden, 1.0)
        weights[p + "post_attention_layernorm.weight"] = vector(hidden, 1.0)
        linears = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, (rows, columns) in linears.items():
            weights[p + name + ".weight"] = matrix(rows, columns, columns)
            is_qkv = name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
            has_bias = spec.bias and (spec.model_type != "qwen3" or name.startswith("self_attn."))
            if has_bias or (spec.model_type == "qwen2" and is_qkv):
                weights[p + name + ".bias"] = vector(rows, 0.0)
        for norm in ("q_norm", "k_norm") if spec.model_type == "qwen3" else ():
            weights[f"{p}self_attn.{norm}.weight"] = vector(width, 1.0)
    weights["model.norm.weight"] = vector(hidden, 1.0)
    if not spec.tied:
        weights["lm_head.weight"] = matrix(spec.vocab_size, hidden, hidden)
    return weights


def _gpt2(spec: TinySpec, matrix: Any, vector: Any) -> Weights:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    weights: Weights = {
        "transformer.wte.weight": matrix(spec.vocab_size, hidden, 1),
        "transformer.wpe.weight": matrix(spec.max_positions, hidden, 1),
    }
    for i in range(spec.num_layers):
        p = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            weights[p + norm + ".weight"] = vector(hidden, 1.0)
            weights[p + norm + ".bias"] = vector(hidden, 0.0)
        # Conv1D: (in_features, out_features).
        conv1d = {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, inner),
            "mlp.c_proj": (inner, hidden),
        }
        for name, (fan_in, fan_out) in conv1d.items():
            weights[p + name + ".weight"] = matrix(fan_in, fan_out, fan_in)
            weights[p + name + ".bias"] = vector(fan_out, 0.0)
    weights["transformer.ln_f.weight"] = vector(hidden, 1.0)
    weights["transformer.ln_f.bias"] = vector(hidden, 0.0)
    if not spec.tied:
        weights["lm_head.weight"] = matrix(spec.vocab_size, hidden, hidden)
    return weights


def byte_alphabet() -> list[str]:
    """The 256 characters byte-level vocabularies use, in the order of their code points."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return sorted([chr(b) for b in kept] + [chr(256 + i) for i in range(256 - len(kept))])


def tokenizer_json(**parts: Any) -> dict[str, Any]:
    """A byte-level tokenizer.json: one token a byte, three special tokens. `parts` are laid over it."""
    special = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {char: i for i, char in enumerate(byte_alphabet())} | special,
            "merges": [],
        },
    } | parts


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON file."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_model(folder: Path, spec: TinySpec) -> Weights:
    """Writes the whole model folder; returns the weights."""
    weights = weights_of(spec)
    write_json(folder / "config.json", config_of(spec))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "tokenizer.json", tokenizer_json())
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return weights
