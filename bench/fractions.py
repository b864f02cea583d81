"""Naru's figures as parts of what the machine can do at most: bytes that a token must read, operations it needs. Pure,
but for `facts_of`, which reads a GGUF file's head. Called by `engine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
from bench.workload import NUM_CONCURRENT, Scale

KV_BYTES = 2
"""Of a value in the KV cache, as all engines keep it here by default (16 bits)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a step costs, by a model's sizes."""

    weight_bytes: int
    """All tensors as they lie in the file; each step reads all of them once (the embedding is the head, too)."""
    layer_weights: int
    """Weights of all matrices but embedding and head."""
    head_weights: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return 2 * KV_BYTES * self.num_layers * self.num_kv_heads * self.head_dim


def facts_of(path: Path) -> ModelFacts:
    """From a GGUF file with a tied or an own head."""
    reader = gguf.GGUFReader(path)

    def number(key: str, default: int = 0) -> int:
        field = reader.fields.get(f"llama.{key}")
        return int(field.contents()) if field is not None else default

    matrices = {t.name: math.prod(int(size) for size in t.shape) for t in reader.tensors if len(t.shape) == 2}
    heads = number("attention.head_count")
    return ModelFacts(
        weight_bytes=sum(int(tensor.n_bytes) for tensor in reader.tensors),
        layer_weights=sum(count for name, count in matrices.items() if name.startswith("blk.")),
        head_weights=matrices.get("output.weight", matrices["token_embd.weight"]),
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=number("attention.key_length", number("embedding_length") // heads),
    )


@dataclass(frozen=True, slots=True)
class Peak:
    """What all cores do at most."""

    read_bytes_s: float
    """At the size of the weights."""
    float_ops_s: float
    int8_ops_s: float


@dataclass(frozen=True, slots=True)
class Fraction:
    """One figure beside its limits, in tokens a second."""

    case: str
    measured_tok_s: float
    read_limit_tok_s: float
    float_limit_tok_s: float
    int8_limit_tok_s: float

    @property
    def of_limit(self) -> float:
        """Measured over the smaller of what memory and the best instruction allow."""
        best_ops = max(self.float_limit_tok_s, self.int8_limit_tok_s)
        return self.measured_tok_s / min(self.read_limit_tok_s, best_ops)


def decode_limits(facts: ModelFacts, peak: Peak, num_sequences: int, context: float) -> tuple[float, float, float]:
    """(by reading, by float, by int8), tokens a second of all sequences together at this mean context, in tokens."""
    read_bytes = facts.weight_bytes + num_sequences * context * facts.kv_bytes_per_token
    operations = token_operations(facts, context, with_head=True)
    return (
        num_sequences * peak.read_bytes_s / read_bytes,
        peak.float_ops_s / operations,
        peak.int8_ops_s / operations,
    )


def prefill_limits(facts: ModelFacts, peak: Peak, length: int) -> tuple[float, float, float]:
    """The same for the tokens of one prompt; memory is read once for all of it."""
    operations = token_operations(facts, length / 2, with_head=False)
    return length * peak.read_bytes_s / facts.weight_bytes, peak.float_ops_s / operations, peak.int8_ops_s / operations


def token_operations(facts: ModelFacts, context: float, *, with_head: bool) -> float:
    """Multiplications and additions for one token that attends to `context` others."""
    weights = facts.layer_weights + (facts.head_weights if with_head else 0)
    attention = 2 * facts.num_layers * facts.num_heads * facts.head_dim * context
    return 2 * (weights + attention)


def fractions(
    figures: Mapping[str, Mapping[str, float]], facts: ModelFacts, peak: Peak, scale: Scale
) -> list[Fraction]:
    """Of the cases that were measured: rates of whole requests, client to client, so prompts and HTTP count too."""
    concurrent = (64 + 8 * (NUM_CONCURRENT - 1) / 2) + scale.concurrent_output / 2
    long_context = scale.long_prompt + scale.long_output / 2
    cases = {
        "single": ("output_tok_s", decode_limits(facts, peak, 1, scale.single_prompt + scale.single_output / 2)),
        "conc16": ("output_tok_s", decode_limits(facts, peak, NUM_CONCURRENT, concurrent)),
        "prefill": ("prefill_tok_s", prefill_limits(facts, peak, scale.prefill_prompt)),
        "prefill8k": ("prefill_tok_s", prefill_limits(facts, peak, scale.long_prompt)),
        "decode8k": ("decode_tok_s", decode_limits(facts, peak, 1, long_context)),
    }
    return [
        Fraction(case, figures[case][name], *limits)
        for case, (name, limits) in cases.items()
        if name in figures.get(case, {})
    ]


def table(found: list[Fraction]) -> str:
    """One line a case."""
    lines = [f"{'tokens/s':12}{'measured':>10}{'by reading':>12}{'by float':>10}{'by int8':>10}{'of limit':>10}"]
    for one in found:
        lines.append(
            f"{one.case:12}{one.measured_tok_s:10.0f}{one.read_limit_tok_s:12.0f}{one.float_limit_tok_s:10.0f}"
            f"{one.int8_limit_tok_s:10.0f}{one.of_limit:10.0%}"
        )
    return "\n".join(lines)
