"""Reads the spellings of rotary scaling in Hugging Face configs into one `RopeConfig`.

Called by the config parsers. An unknown kind is an error: scaling is never dropped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from naru_worker.core.fields import MAX_POSITIONS, Fields
from naru_worker.core.model_config import RopeConfig, RopeKind
from naru_worker.core.rope import yarn_attention_factor

MAX_FACTOR = 1e4
MAX_THETA = 1e12

KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeReading:
    """The rotary config and the longest context it is made for, in tokens."""

    rope: RopeConfig
    max_positions: int


def read_hf_rope(fields: Fields, head_dim: int, max_positions: int, default_theta: float = 10_000.0) -> RopeReading:
    """Reads `rope_parameters` (theta inside) or `rope_scaling` with `rope_theta` beside it.

    The kind is `rope_type`, or the older `type`; absent, null and "default" mean plain positions.

    Raises:
        LoadError: unknown kind, nested parameters per layer type, partial rotation, or a value out of range.
    """
    name = "rope_scaling" if fields.table("rope_scaling") else "rope_parameters"
    scaling = Fields(fields.file, _prefixed(name, fields.table(name)))
    outer_theta = fields.number("rope_theta", 1.0 + 1e-6, MAX_THETA, default_theta)
    theta = scaling.number(f"{name}.rope_theta", 1.0 + 1e-6, MAX_THETA, outer_theta)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        fields.fail(name, "differs by layer type; one rotary setting for all layers is supported")
    outer_part = fields.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    if scaling.number(f"{name}.partial_rotary_factor", 0.0, 1.0, outer_part) != 1.0:
        fields.fail("partial_rotary_factor", "is not 1; rotating a part of the head is not supported here")
    kind = scaling.text(f"{name}.rope_type", scaling.text(f"{name}.type", "default"))
    # A model may keep the original length beside the table instead of in it.
    outer_original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    original = scaling.integer(f"{name}.original_max_position_embeddings", 1, MAX_POSITIONS, outer_original)
    return _reading(scaling, f"{name}.", kind, theta, head_dim, max_positions, original)


def _reading(
    scaling: Fields, prefix: str, kind: str, theta: float, head_dim: int, max_positions: int, original: int
) -> RopeReading:
    if kind == "default":
        return RopeReading(RopeConfig(theta=theta, rotary_dim=head_dim), max_positions)
    factor = _factor(scaling, prefix, kind, max_positions, original)
    if kind == "linear":
        return RopeReading(RopeConfig(theta=theta, rotary_dim=head_dim, kind="linear", factor=factor), max_positions)
    if kind == "llama3":
        return RopeReading(_llama3(scaling, prefix, theta, head_dim, factor, original), max_positions)
    if kind == "yarn":
        # The original length times the factor is the limit, wherever the stored maximum stands.
        rope = _yarn(scaling, prefix, theta, head_dim, factor, original)
        return RopeReading(rope, min(int(original * factor), MAX_POSITIONS))
    return scaling.fail(f"{prefix}rope_type", f"is {kind!r}; supported are {', '.join(KINDS)}")


def _factor(scaling: Fields, prefix: str, kind: str, max_positions: int, original: int) -> float:
    if kind not in KINDS:
        scaling.fail(f"{prefix}rope_type", f"is {kind!r}; supported are {', '.join(KINDS)}")
    implied = max_positions / original if kind == "yarn" and max_positions > original else None
    return scaling.number(f"{prefix}factor", 1.0, MAX_FACTOR, implied)


def _llama3(scaling: Fields, prefix: str, theta: float, head_dim: int, factor: float, original: int) -> RopeConfig:
    low = scaling.number(f"{prefix}low_freq_factor", 1e-3, 1e4)
    high = scaling.number(f"{prefix}high_freq_factor", 1e-3, 1e4)
    if high <= low:
        scaling.fail(f"{prefix}high_freq_factor", f"is {high!r}; it must be above low_freq_factor {low!r}")
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _yarn(scaling: Fields, prefix: str, theta: float, head_dim: int, factor: float, original: int) -> RopeConfig:
    default = yarn_attention_factor(
        factor,
        scaling.number(f"{prefix}mscale", 0.0, 100.0, 0.0),
        scaling.number(f"{prefix}mscale_all_dim", 0.0, 100.0, 0.0),
    )
    return RopeConfig(
        theta=theta,
        rotary_dim=head_dim,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=scaling.number(f"{prefix}beta_fast", 1e-3, 1e4, 32.0),
        beta_slow=scaling.number(f"{prefix}beta_slow", 1e-3, 1e4, 1.0),
        attention_factor=scaling.number(f"{prefix}attention_factor", 1e-3, 100.0, default),
        yarn_truncate=scaling.boolean(f"{prefix}truncate", True),
    )


def _prefixed(name: str, table: object) -> dict[str, object]:
    assert isinstance(table, dict)
    return {f"{name}.{key}": value for key, value in table.items()}
