"""A `ModelConfig` as JSON and back, checked as strictly as a file from anywhere. Used by the image's index."""

from __future__ import annotations

import dataclasses
from typing import cast, get_args

from naru_worker.core.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    Fields,
)
from naru_worker.core.model_config import Activation, Architecture, ModelConfig, NormKind, RopeConfig, RopeKind

_MIN_NUMBER, _MAX_NUMBER = 1e-30, 1e30
"""Of rotary settings: all are positive, and several are divided by."""
_MIN_THETA = 1.0 + 1e-6
"""Its logarithm is divided by."""
_NOT_IN_IMAGES = ("experts",)
"""Images are the CPU's, which serves no model that has them."""
_SIZES = {
    "vocab_size": MAX_VOCAB_SIZE,
    "hidden_size": MAX_HIDDEN_SIZE,
    "intermediate_size": MAX_INTERMEDIATE_SIZE,
    "num_layers": MAX_LAYERS,
    "num_heads": MAX_HEADS,
    "num_kv_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
}


def config_to_json(config: ModelConfig) -> dict[str, object]:
    """Every field that images have, in the order of the class."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IN_IMAGES}


def config_from_json(where: str, values: object) -> ModelConfig:
    """The config again.

    Raises:
        LoadError: a field is missing, unknown, of another type or out of range.
    """
    fields = _object(where, "config", values, ModelConfig)
    rope = fields.values["rope"]
    return ModelConfig(
        architecture=cast(Architecture, _one_of(fields, "architecture", Architecture)),
        **{name: fields.integer(name, 1, high) for name, high in _SIZES.items()},
        norm=cast(NormKind, _one_of(fields, "norm", NormKind)),
        norm_eps=fields.number("norm_eps", 0.0, 1.0),
        activation=cast(Activation, _one_of(fields, "activation", Activation)),
        rope=None if rope is None else _rope(where, rope),
        tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
        qkv_bias=_flag(fields, "qkv_bias"),
        o_bias=_flag(fields, "o_bias"),
        mlp_bias=_flag(fields, "mlp_bias"),
        sliding_windows=_windows(fields),
        bos_token_id=fields.integer("bos_token_id", 0, MAX_VOCAB_SIZE) if fields.has("bos_token_id") else None,
        eos_token_ids=tuple(sorted(fields.token_ids("eos_token_ids"))),
        qk_norm=_flag(fields, "qk_norm"),
        experts=None,
    )


def _rope(where: str, values: object) -> RopeConfig:
    fields = _object(where, "rope", values, RopeConfig)
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    rotary_dim = fields.integer("rotary_dim", 2, MAX_HEAD_DIM)
    factors = fields.values["freq_factors"]
    if not isinstance(factors, list) or len(factors) not in (0, rotary_dim // 2):
        fields.fail("freq_factors", f"must be a list of {rotary_dim // 2} numbers, or none")
    return RopeConfig(
        **{name: fields.number(name, _MIN_NUMBER, _MAX_NUMBER) for name in numbers},
        theta=fields.number("theta", _MIN_THETA, _MAX_NUMBER),
        rotary_dim=rotary_dim,
        kind=cast(RopeKind, _one_of(fields, "kind", RopeKind)),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
        yarn_truncate=_flag(fields, "yarn_truncate"),
        freq_factors=tuple(Fields(where, {"f": item}).number("f", _MIN_NUMBER, _MAX_NUMBER) for item in factors),
    )


def _object(where: str, name: str, values: object, kind: type) -> Fields:
    needed = {field.name for field in dataclasses.fields(kind)} - set(_NOT_IN_IMAGES)
    fields = Fields(where, values if isinstance(values, dict) else {})
    if set(fields.values) != needed:
        fields.fail(name, f"must have the fields {', '.join(sorted(needed))}")
    return fields


def _one_of(fields: Fields, name: str, kind: object) -> str:
    value = fields.text(name, "")
    assert kind in (Architecture, NormKind, Activation, RopeKind)
    if value not in get_args(kind):
        fields.fail(name, f"is {value!r}; it must be one of {', '.join(get_args(kind))}")
    return value


def _flag(fields: Fields, name: str) -> bool:
    if not fields.has(name):
        fields.fail(name, "is missing; true or false is needed")
    return fields.boolean(name, False)


def _windows(fields: Fields) -> tuple[int | None, ...]:
    windows = fields.values["sliding_windows"]
    if not isinstance(windows, list) or len(windows) not in (0, fields.integer("num_layers", 1, MAX_LAYERS)):
        fields.fail("sliding_windows", "must be a list with one entry a layer, or none")
    return tuple(None if w is None else Fields(fields.file, {"w": w}).integer("w", 1, 2**31 - 1) for w in windows)
