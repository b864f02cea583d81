"""Where each canonical tensor lies in a file: the source's name and how to cut and turn it.

Called when a checkpoint is opened. Pure naming: the cutting itself is the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One canonical tensor in a file. Steps in this order: take the part, transpose, cut rows, unpermute."""

    source: str
    transposed: bool = False
    """The file holds (in_features, out_features)."""
    rows: tuple[int, int] | None = None
    """Half-open range of (transposed) rows; None: all."""
    part: tuple[int, int] | None = None
    """(i, n): the i-th of n that the file holds one behind the other, along one more axis; None: it is by itself."""
    num_rope_heads: int = 0
    """Above 0: rows are in the interleaved rotary order of that many heads."""


_LLAMA_HF = {
    "attn_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "shared_router": "mlp.shared_expert_gate",
}
_MATRICES_HF = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MATRICES_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT2_HF = {
    "attn_norm": "ln_1",
    "o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_GGUF = {
    "attn_norm": "attn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
    "shared_router": "ffn_gate_inp_shexp",
}


def hf_place(config: ModelConfig, name: str) -> TensorPlace:
    """The place of a canonical tensor in Hugging Face's layout (without GPT-2's optional ``transformer.`` prefix)."""
    base, suffix = _split_suffix(name)
    if config.architecture == "gpt2":
        top = {"embed": "wte", "pos_embed": "wpe", "final_norm": "ln_f", "lm_head": "lm_head"}
        if base in top:
            return TensorPlace(f"{top[base]}.{suffix}")
        layer, part = _split_layer(base)
        if part in ("q", "k", "v"):
            return _third(config, f"h.{layer}.attn.c_attn.{suffix}", part, transposed=suffix == "weight")
        is_conv1d = suffix == "weight" and not part.endswith("norm")
        return TensorPlace(f"h.{layer}.{_GPT2_HF[part]}.{suffix}", transposed=is_conv1d)
    top = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    if base in top:
        return TensorPlace(f"{top[base]}.{suffix}")
    layer, part = _split_layer(base)
    return TensorPlace(
        f"model.layers.{layer}.{_hf_part(config, part)}.{suffix}", part=(0, 1) if part == "shared_router" else None
    )


def gguf_place(config: ModelConfig, name: str) -> TensorPlace:
    """The place of a canonical tensor in a GGUF file.

    Experts are the parts of one tensor a layer. Files of architecture llama hold the rows of q and k for the
    interleaved rotary layout.
    """
    base, suffix = _split_suffix(name)
    top = {"embed": "token_embd", "pos_embed": "position_embd", "final_norm": "output_norm", "lm_head": "output"}
    if base in top:
        return TensorPlace(f"{top[base]}.{suffix}")
    layer, part = _split_layer(base)
    if config.architecture == "gpt2" and part in ("q", "k", "v"):
        return _third(config, f"blk.{layer}.attn_qkv.{suffix}", part, transposed=False)
    group, _, matrix = part.rpartition(".")
    if group == "shared":
        return TensorPlace(f"blk.{layer}.{_GGUF[matrix]}_shexp.{suffix}")
    if group:
        assert config.experts is not None, "the name says so"
        part_of_all = (int(group.partition(".")[2]), config.experts.num_experts)
        return TensorPlace(f"blk.{layer}.{_GGUF[matrix]}_exps.{suffix}", part=part_of_all)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}.get(part, 0)
    is_interleaved = config.architecture in ("llama", "mixtral")
    return TensorPlace(f"blk.{layer}.{_GGUF[part]}.{suffix}", num_rope_heads=heads if is_interleaved else 0)


def _hf_part(config: ModelConfig, part: str) -> str:
    """Of a layer, the suffix left out."""
    group, _, matrix = part.rpartition(".")
    if config.architecture == "mixtral" and group:
        return f"block_sparse_moe.{group}.{_MATRICES_MIXTRAL[matrix]}"
    if config.architecture == "mixtral" and part == "router":
        return "block_sparse_moe.gate"
    if group:
        return f"mlp.{'shared_expert' if group == 'shared' else group}.{_MATRICES_HF[matrix]}"
    return _LLAMA_HF[part]


def _third(config: ModelConfig, source: str, part: str, transposed: bool) -> TensorPlace:
    """q, k or v of a fused projection of equal thirds."""
    size = config.num_heads * config.head_dim
    start = ("q", "k", "v").index(part) * size
    return TensorPlace(source, transposed=transposed, rows=(start, start + size))


def _split_suffix(name: str) -> tuple[str, str]:
    if name.endswith("_bias"):
        return name.removesuffix("_bias"), "bias"
    return name, "weight"


def _split_layer(base: str) -> tuple[str, str]:
    _, layer, part = base.split(".", 2)
    return layer, part
