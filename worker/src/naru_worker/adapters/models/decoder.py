"""The decoder: one transformer, written once over the operation protocol, for every architecture in the table.

Backends call `load_weights` when a model is loaded and `forward` either at each step (`ref`) or once to record a tape
(`cpu`). Architectures differ only in the flags of `ModelConfig`; there is no subclass per model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from naru_worker.adapters.ops.protocol import HeadNorms, Ops, RawTensor
from naru_worker.adapters.weights.checkpoint import Checkpoint
from naru_worker.core.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Weights of the expert that every token goes through."""

    router: Any
    """A vector: how much of it a token gets."""
    up: Any
    down: Any


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, as handles of the backend."""

    attn_norm: Any
    attn_norm_bias: Any | None
    qkv: Any
    o: Any
    mlp_norm: Any
    mlp_norm_bias: Any | None
    up: Any
    """gate and up stacked (swiglu), or up alone (gelu); an expert matrix where the layer has a router."""
    down: Any
    norms: HeadNorms | None = None
    router: Any | None = None
    """None: the layer has a plain MLP."""
    shared: SharedExpert | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model, as handles of the backend."""

    embed: Any
    pos_embed: Any | None
    layers: tuple[LayerWeights, ...]
    final_norm: Any
    final_norm_bias: Any | None
    lm_head: Any


def load_weights(ops: Ops, checkpoint: Checkpoint) -> DecoderWeights:
    """Hands every tensor of the checkpoint to the backend, q/k/v and gate/up stacked.

    Raises:
        LoadError: a tensor is missing or does not fit the config.
    """
    config = checkpoint.config
    embed = checkpoint.get("embed")
    head = embed if config.tie_word_embeddings else checkpoint.get("lm_head")
    return DecoderWeights(
        embed=ops.table(embed),
        pos_embed=None if config.rope is not None else ops.table(checkpoint.get("pos_embed")),
        layers=tuple(_load_layer(ops, checkpoint, i) for i in range(config.num_layers)),
        final_norm=ops.vector(checkpoint.get("final_norm")),
        final_norm_bias=_bias_vector(ops, checkpoint, "final_norm"),
        lm_head=ops.matrix([head], [None]),
    )


def forward(ops: Ops, config: ModelConfig, weights: DecoderWeights) -> Any:
    """One pass over the current batch; returns the handle of (R, vocab) logits.

    The KV cache is written at the batch's slots before it is read, layer by layer.
    """
    scale = 1.0 / math.sqrt(config.head_dim)
    x = ops.embed(weights.embed)
    if weights.pos_embed is not None:
        x = ops.add_positions(x, weights.pos_embed)
    for i, layer in enumerate(weights.layers):
        h = ops.norm(x, layer.attn_norm, layer.attn_norm_bias, config.norm_eps, config.norm, layer.qkv)
        q = ops.rope_kv(ops.linear(h, layer.qkv), i, config.num_heads, config.rope, layer.norms)
        window = config.sliding_windows[i] if config.sliding_windows else None
        mixed = ops.attention(q, i, scale, window)
        if i == config.num_layers - 1:  # nobody reads what the last layer makes of the other rows
            mixed, x = ops.gather(mixed), ops.gather(x)
        x = ops.linear_add(mixed, layer.o, x)
        reader = layer.up if layer.router is None else None  # a router and experts read it all of them
        h = ops.norm(x, layer.mlp_norm, layer.mlp_norm_bias, config.norm_eps, config.norm, reader)
        x = _mlp(ops, config, layer, h, x)
    x = ops.norm(x, weights.final_norm, weights.final_norm_bias, config.norm_eps, config.norm)
    return ops.logits(x, weights.lm_head)


def _mlp(ops: Ops, config: ModelConfig, layer: LayerWeights, h: Any, x: Any) -> Any:
    """X + what the MLP, or the experts, make of h."""
    if layer.router is None:
        return ops.linear_add(ops.act(ops.linear(h, layer.up), config.activation, layer.down), layer.down, x)
    assert config.experts is not None, "a router was loaded for them"
    shared = layer.shared
    if shared is not None:
        inner = ops.act(ops.linear(h, shared.up), config.activation, shared.down)
        x = ops.add_gated(ops.linear(inner, shared.down), h, shared.router, x)
    return ops.experts(h, layer.router, layer.up, layer.down, x, config.experts)


def _load_layer(ops: Ops, checkpoint: Checkpoint, i: int) -> LayerWeights:
    def tensor(name: str) -> RawTensor:
        return checkpoint.get(f"layers.{i}.{name}")

    def bias(name: str) -> RawTensor | None:
        full = f"layers.{i}.{name}_bias"
        return checkpoint.get(full) if checkpoint.has(full) else None

    config = checkpoint.config
    mlp = ("gate", "up") if config.activation == "swiglu" else ("up",)
    experts = config.experts_of(i)
    if experts is None:
        up = ops.matrix([tensor(n) for n in mlp], [bias(n) for n in mlp])
        down = ops.matrix([tensor("down")], [bias("down")])
    else:
        each = [f"experts.{e}" for e in range(experts.num_experts)]
        up = ops.expert_matrix([[tensor(f"{e}.{n}") for n in mlp] for e in each])
        down = ops.expert_matrix([[tensor(f"{e}.down")] for e in each])
    return LayerWeights(
        attn_norm=ops.vector(tensor("attn_norm")),
        attn_norm_bias=_bias_vector(ops, checkpoint, f"layers.{i}.attn_norm"),
        qkv=ops.matrix([tensor(n) for n in ("q", "k", "v")], [bias(n) for n in ("q", "k", "v")]),
        o=ops.matrix([tensor("o")], [bias("o")]),
        mlp_norm=ops.vector(tensor("mlp_norm")),
        mlp_norm_bias=_bias_vector(ops, checkpoint, f"layers.{i}.mlp_norm"),
        up=up,
        down=down,
        norms=(
            HeadNorms(ops.vector(tensor("q_norm")), ops.vector(tensor("k_norm")), config.norm_eps)
            if config.qk_norm
            else None
        ),
        router=None if experts is None else ops.matrix([tensor("router")], [None]),
        shared=_load_shared(ops, tensor) if experts is not None and experts.shared_size else None,
    )


def _load_shared(ops: Ops, tensor: Callable[[str], RawTensor]) -> SharedExpert:
    return SharedExpert(
        router=ops.vector(tensor("shared_router")),
        up=ops.matrix([tensor("shared.gate"), tensor("shared.up")], [None, None]),
        down=ops.matrix([tensor("shared.down")], [None]),
    )


def _bias_vector(ops: Ops, checkpoint: Checkpoint, name: str) -> Any | None:
    full = f"{name}_bias"
    return ops.vector(checkpoint.get(full)) if checkpoint.has(full) else None
