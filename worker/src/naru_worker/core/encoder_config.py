"""The shape of an encoder: a model that reads a whole text at once and gives a vector, or scores.

Parsed by `core.encoder_parsing` from Hugging Face's config.json and what sentence-transformers puts beside it. Flat
facts, as `core.model_config` has them for decoders; families differ in these flags and in the names of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EncoderFamily = Literal["bert", "roberta", "distilbert"]
EncoderActivation = Literal["gelu", "gelu_tanh", "relu"]
Pooling = Literal["mean", "cls", "max", "mean_sqrt_len", "last"]

ENCODER_MODEL_TYPES: dict[str, EncoderFamily] = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "camembert": "roberta",
    "distilbert": "distilbert",
}
"""`model_type` of config.json to the family that computes it."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Layers that look both ways, a norm behind each part, learned positions; then pooling, or a head of labels."""

    family: EncoderFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """Rows of the position table."""
    first_position: int
    """Row of a text's first token: some families leave the first rows out."""
    num_token_types: int
    """0: there are none."""
    norm_eps: float
    activation: EncoderActivation
    max_tokens: int
    """Of the longest text, special tokens included."""
    pooling: Pooling = "mean"
    normalize: bool = False
    """Vectors have length 1, as the files say."""
    num_labels: int = 0
    """Above 0: it gives so many scores instead of a vector."""
    is_sigmoid: bool = False
    """Scores go through a sigmoid, as the files say."""

    @property
    def head_dim(self) -> int:
        """Numbers of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def width(self) -> int:
        """Numbers of one result."""
        return self.num_labels or self.hidden_size

    @property
    def task(self) -> Literal["embed", "score"]:
        """What it can be asked for."""
        return "score" if self.num_labels else "embed"

    @property
    def head_activation(self) -> Literal["tanh", "relu"]:
        """Of the dense layer before the labels."""
        return "relu" if self.family == "distilbert" else "tanh"
