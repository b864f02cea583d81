"""Models by their published names: shapes that many people know, so that none of their files is needed to plan.

Source: the config.json that each model is published with.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_proto.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Model:
    """What a model's steps cost depends on this."""

    name: str
    shape: ModelShape
    max_context: int
    """Tokens it was made for."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer's attention sees at most; 0: all. Empty: all layers see all."""
    weights: str = "bf16"
    """The format of its files, one of `formats.WEIGHTS`."""


def _llama(layers: int, hidden: int, inner: int, heads: int, *, head_dim: int = 128, tied: bool = False) -> ModelShape:
    return ModelShape(layers, hidden, inner, heads, 8, head_dim, 128_256, is_head_tied=tied)


def _qwen(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, *, tied: bool = False) -> ModelShape:
    head_dim = hidden // heads
    vocab = 151_936 if tied else 152_064
    return ModelShape(layers, hidden, inner, heads, kv_heads, head_dim, vocab, is_head_tied=tied, has_qkv_bias=True)


def _qwen3(layers: int, hidden: int, inner: int, heads: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(layers, hidden, inner, heads, 8, 128, 151_936, is_head_tied=tied, has_qk_norm=True)


def _experts(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, experts: int, chosen: int, *, vocab: int,
    norms: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        layers, hidden, inner, heads, kv_heads, 128, vocab, has_qk_norm=norms,
        num_experts=experts, num_chosen_experts=chosen, expert_size=inner,
    )  # fmt: skip


MODELS = {
    model.name: model
    for model in (
        Model("llama-3.1-8b", _llama(32, 4096, 14_336, 32), 131_072),
        Model("llama-3.1-70b", _llama(80, 8192, 28_672, 64), 131_072),
        Model("llama-3.2-1b", _llama(16, 2048, 8192, 32, head_dim=64, tied=True), 131_072),
        Model("llama-3.2-3b", _llama(28, 3072, 8192, 24, tied=True), 131_072),
        Model("mistral-7b-v0.3", ModelShape(32, 4096, 14_336, 32, 8, 128, 32_768), 32_768),
        Model("qwen2.5-0.5b", _qwen(24, 896, 4864, 14, 2, tied=True), 32_768),
        Model("qwen2.5-1.5b", _qwen(28, 1536, 8960, 12, 2, tied=True), 32_768),
        Model("qwen2.5-3b", _qwen(36, 2048, 11_008, 16, 2, tied=True), 32_768),
        Model("qwen2.5-7b", _qwen(28, 3584, 18_944, 28, 4), 32_768),
        Model("qwen2.5-14b", _qwen(48, 5120, 13_824, 40, 8), 32_768),
        Model("qwen2.5-32b", _qwen(64, 5120, 27_648, 40, 8), 32_768),
        Model("qwen2.5-72b", _qwen(80, 8192, 29_568, 64, 8), 32_768),
        Model("mixtral-8x7b", _experts(32, 4096, 14_336, 32, 8, 8, 2, vocab=32_000), 32_768),
        Model("qwen3-0.6b", _qwen3(28, 1024, 3072, 16, tied=True), 40_960),
        Model("qwen3-1.7b", _qwen3(28, 2048, 6144, 16, tied=True), 40_960),
        Model("qwen3-4b", _qwen3(36, 2560, 9728, 32, tied=True), 40_960),
        Model("qwen3-8b", _qwen3(36, 4096, 12_288, 32), 40_960),
        Model("qwen3-14b", _qwen3(40, 5120, 17_408, 40), 40_960),
        Model("qwen3-32b", _qwen3(64, 5120, 25_600, 64), 40_960),
        Model("qwen3-30b-a3b", _experts(48, 2048, 768, 32, 4, 128, 8, vocab=151_936, norms=True), 40_960),
        Model("qwen3-235b-a22b", _experts(94, 4096, 1536, 64, 4, 128, 8, vocab=151_936, norms=True), 40_960),
        Model("smollm2-135m", ModelShape(30, 576, 1536, 9, 3, 64, 49_152, is_head_tied=True), 8192),
    )
}
"""By the name that a user writes."""
