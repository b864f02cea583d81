"""The shape of a model, normalised from Hugging Face's config.json or GGUF metadata.

One flat record of facts; architectures differ only in these flags, so that one decoder serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["llama", "qwen2", "gpt2", "qwen3", "mixtral", "qwen2moe", "qwen3moe"]
NormKind = Literal["rms", "layer"]
Activation = Literal["swiglu", "gelu_tanh", "gelu"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions, half-rotation (NeoX) layout: element i pairs with i + rotary_dim / 2."""

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN's mscale)."""
    yarn_truncate: bool = True
    """YaRN: round the ends of the ramp to whole dimensions."""
    freq_factors: tuple[float, ...] = ()
    """Empty, or rotary_dim / 2 divisors of the frequencies (a table some GGUF files carry)."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: gated MLPs of which each token goes through a few, weighted by a softmax over all."""

    num_experts: int
    num_chosen: int
    """Experts of each token, at most `num_experts`."""
    inner_size: int
    """Width of one expert's inner layer."""
    renormalizes: bool
    """Whether the weights of a token's experts are made to sum up to 1; else they stay the softmax's."""
    layers: tuple[int, ...]
    """Layers that have experts, ascending; the others have a plain MLP."""
    shared_size: int = 0
    """Inner width of an expert that every token goes through, weighted by a gate of its own; 0: there is none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder, the KV cache and admission need to know. All counts; no tensors."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    rope: RopeConfig | None
    """None: learned positions."""
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer, in tokens; empty or None: full attention. A window of W sees the W newest tokens, itself included."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of all sources (config, generation config, tokenizer), sorted."""
    qk_norm: bool = False
    """Whether each head's query and key pass an RMSNorm (of `norm_eps`) before they turn."""
    experts: ExpertsConfig | None = None
    """None: all layers have a plain MLP of `intermediate_size`."""

    @property
    def widest_inner_size(self) -> int:
        """Width of the widest inner layer that a token goes through; all of a token's experts count together."""
        if self.experts is None:
            return self.intermediate_size
        chosen = self.experts.num_chosen * self.experts.inner_size
        return max(self.intermediate_size, chosen, self.experts.shared_size)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The mixture of a layer; None where it has a plain MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def kv_bytes_per_token(self, bytes_per_element: int) -> int:
        """Bytes of keys and values one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_element
