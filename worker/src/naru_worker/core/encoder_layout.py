"""Where an encoder's tensors lie in Hugging Face's files: names and shapes, in the order in which backends take them.

Called when a checkpoint is opened. Pure naming.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.core.encoder_config import EncoderConfig

Shape = tuple[int, ...]
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "distilbert": "distilbert."}
"""Before the names of the encoder itself where a head lies beside it."""


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """One tensor as a backend wants it: sources one below the other, all of one shape."""

    name: str
    sources: tuple[str, ...]
    shape: Shape
    """Of each source."""


_BERT_LAYER = {
    "o": "attention.output.dense",
    "attn_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_DISTILBERT_LAYER = {
    "o": "attention.out_lin",
    "attn_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}


def encoder_parts(config: EncoderConfig) -> list[EncoderPart]:
    """Everything the encoder reads; names without the family's prefix."""
    hidden = config.hidden_size
    parts = [
        EncoderPart("words", ("embeddings.word_embeddings.weight",), (config.vocab_size, hidden)),
        EncoderPart("positions", ("embeddings.position_embeddings.weight",), (config.num_positions, hidden)),
    ]
    if config.num_token_types:
        shape = (config.num_token_types, hidden)
        parts.append(EncoderPart("types", ("embeddings.token_type_embeddings.weight",), shape))
    parts += _both("embed_norm", ("embeddings.LayerNorm",), (hidden,), hidden)
    for i in range(config.num_layers):
        parts += _layer(config, i)
    return parts + _head(config)


def _layer(config: EncoderConfig, i: int) -> list[EncoderPart]:
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.family == "distilbert":
        base, names, qkv = f"transformer.layer.{i}.", _DISTILBERT_LAYER, "attention.{}_lin"
        letters: tuple[str, ...] = ("q", "k", "v")
    else:
        base, names, qkv = f"encoder.layer.{i}.", _BERT_LAYER, "attention.self.{}"
        letters = ("query", "key", "value")
    parts = _both(f"layers.{i}.qkv", tuple(base + qkv.format(letter) for letter in letters), (hidden, hidden), hidden)
    for name, shape in (
        ("o", (hidden, hidden)),
        ("attn_norm", (hidden,)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
        ("mlp_norm", (hidden,)),
    ):
        parts += _both(f"layers.{i}.{name}", (base + names[name],), shape, shape[0])
    return parts


def _head(config: EncoderConfig) -> list[EncoderPart]:
    if not config.num_labels:
        return []
    hidden, labels = config.hidden_size, config.num_labels
    dense, out = {
        "bert": ("pooler.dense", "classifier"),
        "roberta": ("classifier.dense", "classifier.out_proj"),
        "distilbert": ("pre_classifier", "classifier"),
    }[config.family]
    return [
        *_both("head_dense", (dense,), (hidden, hidden), hidden),
        *_both("head_out", (out,), (labels, hidden), labels),
    ]


def _both(name: str, modules: tuple[str, ...], shape: Shape, num_biases: int) -> list[EncoderPart]:
    return [
        EncoderPart(name, tuple(f"{module}.weight" for module in modules), shape),
        EncoderPart(f"{name}_bias", tuple(f"{module}.bias" for module in modules), (num_biases,)),
    ]
