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
        for name, shape in _layer_shapes(config).items():
            shapes[f"layers.{i}.{name}"] = shape
    shapes["final_norm"] = (hidden,)
    if config.norm == "layer":
        shapes["final_norm_bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.activation == "swiglu":
        matrices["gate"] = (inner, hidden)
    biased = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    shapes: dict[str, Shape] = {}
    for norm in ("attn_norm", "mlp_norm"):
        shapes[norm] = (hidden,)
        if config.norm == "layer":
            shapes[f"{norm}_bias"] = (hidden,)
    for name, shape in matrices.items():
        shapes[name] = shape
        if biased.get(name, config.mlp_bias):
            shapes[f"{name}_bias"] = shape[:1]
    return shapes
