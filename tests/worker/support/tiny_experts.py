"""Tiny random mixtures of experts, as Hugging Face folders and as GGUF files, written with numpy alone.

Names and shapes are spelt out here on their own, as in `tiny_models`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf_builder import BF16, F32, Q4_0, Q8_0, GgufTensor, build, byte_level_tokenizer, interleaved
from safetensors.numpy import save_file
from tiny_models import TinySpec, Weights, config_of, tokenizer_json, weights_of, write_json

Kind = Literal["mixtral", "qwen2_moe", "qwen3_moe"]

NUM_EXPERTS, NUM_CHOSEN, INNER, SHARED = 4, 2, 32, 64
"""Of all tiny mixtures. Layers are those of `TinySpec`; SHARED is Qwen 2's."""
_CLASSES = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
_ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def expert_config(kind: Kind, **extra: Any) -> dict[str, Any]:
    """The config.json; `extra` is laid over it."""
    config = config_of(_base(kind)) | {"architectures": [f"{_CLASSES[kind]}ForCausalLM"], "model_type": kind}
    config |= {"num_experts_per_tok": NUM_CHOSEN, "head_dim": 16}
    if kind == "mixtral":
        return config | {"num_local_experts": NUM_EXPERTS, "intermediate_size": INNER, "sliding_window": None} | extra
    config |= {"num_experts": NUM_EXPERTS, "moe_intermediate_size": INNER, "norm_topk_prob": kind == "qwen3_moe"}
    if kind == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": SHARED}
    return config | extra


def expert_weights(kind: Kind, plain_layers: tuple[int, ...] = ()) -> Weights:
    """Under Hugging Face's names; `plain_layers` keep their MLP."""
    spec = _base(kind)
    weights = weights_of(spec)
    rng = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    hidden = spec.hidden_size
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}."
        if kind == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                weights[f"{layer}self_attn.{norm}.weight"] = (1 + 0.2 * rng.standard_normal(16)).astype(np.float32)
        if i in plain_layers:
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{layer}mlp.{name}.weight"]
        block = layer + ("block_sparse_moe." if kind == "mixtral" else "mlp.")
        # Large, so that experts differ in what a token gets of them.
        weights[f"{block}gate.weight"] = 3 * matrix(NUM_EXPERTS, hidden)
        sizes = {f"experts.{e}": INNER for e in range(NUM_EXPERTS)}
        for group, inner in (sizes | ({"shared_expert": SHARED} if kind == "qwen2_moe" else {})).items():
            for name, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            ):
                own = _MIXTRAL_NAMES[name] if kind == "mixtral" else name
                weights[f"{block}{group}.{own}.weight"] = 2 * matrix(*shape)
        if kind == "qwen2_moe":
            weights[f"{block}shared_expert_gate.weight"] = 3 * matrix(1, hidden)
    return weights


def write_experts(
    folder: Path, kind: Kind, *, plain_layers: tuple[int, ...] = (), weights: Weights | None = None, **extra: Any
) -> Weights:
    """Writes a whole folder; returns the weights."""
    weights = expert_weights(kind, plain_layers) if weights is None else weights
    if plain_layers:
        extra = {"mlp_only_layers": list(plain_layers)} | extra
    write_json(folder / "config.json", expert_config(kind, **extra))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "tokenizer.json", tokenizer_json())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return weights


def expert_gguf(kind: Kind, types: dict[str, int] | None = None, without: str = "", **extra: Any) -> bytes:
    """The same model as a GGUF file.

    `types` are those of tensors whose names end so: of an expert tensor, ``ffn_down_exps.weight``. `without` leaves a
    tensor out; `extra` is laid over the metadata, dots written as two underscores.
    """
    metadata = _metadata(kind) | {key.replace("__", "."): item for key, item in extra.items() if item is not None}
    for key in (key.replace("__", ".") for key, item in extra.items() if item is None):
        del metadata[key]
    arrays = _gguf_arrays(kind)
    arrays.pop(without, None)
    tensors = []
    for name, array in arrays.items():
        number = next((number for end, number in (types or {}).items() if name.endswith(end)), F32)
        tensors.append(GgufTensor(name, array.shape, number, _encoded(array, number)))
    return build(metadata, tensors)


def _base(kind: Kind) -> TinySpec:
    return replace(TinySpec("qwen2" if kind == "qwen2_moe" else "llama"), head_dim=16)


def _metadata(kind: Kind) -> dict[str, Any]:
    spec, arch = _base(kind), _ARCHITECTURES[kind]
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.context_length": spec.max_positions,
        f"{arch}.embedding_length": spec.hidden_size,
        f"{arch}.feed_forward_length": INNER if kind == "mixtral" else spec.intermediate_size,
        f"{arch}.attention.head_count": spec.num_heads,
        f"{arch}.attention.head_count_kv": spec.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.key_length": 16,
        f"{arch}.attention.value_length": 16,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.expert_count": NUM_EXPERTS,
        f"{arch}.expert_used_count": NUM_CHOSEN,
    }
    if kind != "mixtral":
        metadata[f"{arch}.expert_feed_forward_length"] = INNER
    if kind == "qwen2_moe":
        metadata[f"{arch}.expert_shared_feed_forward_length"] = SHARED
    return metadata | byte_level_tokenizer()


def _gguf_arrays(kind: Kind) -> dict[str, Any]:
    spec, weights = _base(kind), expert_weights(kind)
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    arrays = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
        "output.weight": weights["lm_head.weight"],
    }
    names = {
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "ffn_gate_inp.weight": f"{block}.gate.weight",
        "ffn_gate_inp_shexp.weight": f"{block}.shared_expert_gate.weight",
    }
    for part in "qkv":
        names |= {f"attn_{part}.{end}": f"self_attn.{part}_proj.{end}" for end in ("weight", "bias")}
    for part in ("gate", "up", "down"):
        names[f"ffn_{part}_shexp.weight"] = f"{block}.shared_expert.{part}_proj.weight"
    for i in range(spec.num_layers):
        own = {name: weights.get(f"model.layers.{i}.{source}") for name, source in names.items()}
        arrays |= {f"blk.{i}.{name}": array.squeeze() for name, array in own.items() if array is not None}
        for part in ("gate", "up", "down"):
            name = _MIXTRAL_NAMES[f"{part}_proj"] if kind == "mixtral" else f"{part}_proj"
            experts = [weights[f"model.layers.{i}.{block}.experts.{e}.{name}.weight"] for e in range(NUM_EXPERTS)]
            arrays[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack(experts)
        if kind == "mixtral":
            for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
                arrays[f"blk.{i}.attn_{part}.weight"] = interleaved(arrays[f"blk.{i}.attn_{part}.weight"], heads)
    return arrays


def _encoded(array: Any, number: int) -> bytes:
    if number == F32:
        return bytes(array.astype("<f4").tobytes())
    kind = {BF16: "BF16", Q8_0: "Q8_0", Q4_0: "Q4_0"}[number]
    return bytes(gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]).tobytes())
