"""Canonical tensor names and shapes of a model: what a checkpoint must hold.

Called when a checkpoint is opened, to check every tensor before anything is loaded.
"""

from __future__ import annotations

from naru_worker.core.model_config import ModelConfig

Shape = tuple[int, ...]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name to shape of every tensor the decoder reads, in loading order."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, hidden)}
    if config.rope is None:
        shapes["pos_embed"] = (config.max_position_embeddings, hidden)
    for i in range(config.num_layers):
        for name, shape in {**_attention_shapes(config), **_mlp_shapes(config, i)}.items():
            shapes[f"layers.{i}.{name}"] = shape
    shapes["final_norm"] = (hidden,)
    if config.norm == "layer":
        shapes["final_norm_bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Of attention, and both norms of a layer."""
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {}
    for norm in ("attn_norm", "mlp_norm"):
        shapes[norm] = (hidden,)
        if config.norm == "layer":
            shapes[f"{norm}_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    for name, shape in {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}.items():
        shapes[name] = shape
        if config.o_bias if name == "o" else config.qkv_bias:
            shapes[f"{name}_bias"] = shape[:1]
    return shapes


def _mlp_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, experts = config.hidden_size, config.experts_of(layer)
    shapes: dict[str, Shape] = {}
    if experts is None:
        for name, shape in _matrices(hidden, config.intermediate_size, is_gated=config.activation == "swiglu").items():
            shapes[name] = shape
            if config.mlp_bias:
                shapes[f"{name}_bias"] = shape[:1]
        return shapes
    shapes["router"] = (experts.num_experts, hidden)
    for expert in range(experts.num_experts):
        for name, shape in _matrices(hidden, experts.inner_size, is_gated=True).items():
            shapes[f"experts.{expert}.{name}"] = shape
    if experts.shared_size:
        shapes["shared_router"] = (hidden,)
        for name, shape in _matrices(hidden, experts.shared_size, is_gated=True).items():
            shapes[f"shared.{name}"] = shape
    return shapes


def _matrices(hidden: int, inner: int, *, is_gated: bool) -> dict[str, Shape]:
    return {"up": (inner, hidden), "down": (hidden, inner), **({"gate": (inner, hidden)} if is_gated else {})}
