"""The decoder in plain numpy and double precision, one sequence at a time: what the kernels are measured against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from memory_models import Float64Array, MemoryCheckpoint

from naru_worker.core.model_config import ModelConfig
from naru_worker.core.rope import inverse_frequencies


def logits_of(checkpoint: MemoryCheckpoint, token_ids: Sequence[int]) -> Float64Array:
    """(T, vocab) logits of one sequence from position 0."""
    config, w = checkpoint.config, checkpoint.values
    x = w["embed"][list(token_ids)]
    if config.rope is None:
        x = x + w["pos_embed"][: len(token_ids)]
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        x = x + _attention(config, w, layer, i, _norm(config, w, layer + "attn_norm", x))
        h = _norm(config, w, layer + "mlp_norm", x)
        up = _linear(w, layer + "up", h)
        act = (
            _act(config.activation, up) if config.activation != "swiglu" else _silu(_linear(w, layer + "gate", h)) * up
        )
        x = x + _linear(w, layer + "down", act)
    head = w["embed"] if config.tie_word_embeddings else w["lm_head"]
    result: Float64Array = _norm(config, w, "final_norm", x) @ head.T
    return result


def _attention(
    config: ModelConfig, w: dict[str, Float64Array], layer: str, index: int, h: Float64Array
) -> Float64Array:
    count, dim = len(h), config.head_dim
    q, k, v = (_linear(w, layer + n, h).reshape(count, -1, dim) for n in ("q", "k", "v"))
    if config.qk_norm:
        q, k = _norm(config, w, layer + "q_norm", q), _norm(config, w, layer + "k_norm", k)
    q, k = _rotate(config, q), _rotate(config, k)
    group = config.num_heads // config.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(dim)
    distance = np.arange(count)[:, None] - np.arange(count)[None, :]
    window = config.sliding_windows[index] if config.sliding_windows else None
    hidden = (distance < 0) | (distance >= (window or count))
    scores = np.where(hidden[None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", weights, v).reshape(count, -1)
    return _linear(w, layer + "o", mixed)


def _linear(w: dict[str, Float64Array], name: str, x: Float64Array) -> Float64Array:
    result: Float64Array = x @ w[name].T + w.get(name + "_bias", np.zeros(1))
    return result


def _norm(config: ModelConfig, w: dict[str, Float64Array], name: str, x: Float64Array) -> Float64Array:
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
    result: Float64Array = scaled * w[name] + w.get(name + "_bias", np.zeros(1))
    return result


def _rotate(config: ModelConfig, x: Float64Array) -> Float64Array:
    rope = config.rope
    if rope is None:
        return x
    angles = np.arange(len(x))[:, None] * np.array(inverse_frequencies(rope))[None]
    c, s = (f(angles)[:, None] * rope.attention_factor for f in (np.cos, np.sin))
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def _silu(x: Float64Array) -> Float64Array:
    result: Float64Array = x / (1.0 + np.exp(-x))
    return result


def _act(kind: str, x: Float64Array) -> Float64Array:
    if kind == "gelu_tanh":
        result: Float64Array = 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        return result
    exact: Float64Array = 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    return exact
