"""Inverse frequencies of rotary positions, for every scaling kind.

Called by the backends once per model. Does not rotate anything: angle = position * frequency is the backend's work, and
cos and sin are to be multiplied by `RopeConfig.attention_factor`.
"""

from __future__ import annotations

import math

from naru_worker.core.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> tuple[float, ...]:
    """Radians per position of each rotated pair, (rotary_dim / 2,), in double precision."""
    half = rope.rotary_dim // 2
    plain = [rope.theta ** (-2.0 * i / rope.rotary_dim) for i in range(half)]
    if rope.kind == "linear":
        scaled = [f / rope.factor for f in plain]
    elif rope.kind == "llama3":
        scaled = [_llama3(rope, f) for f in plain]
    elif rope.kind == "yarn":
        scaled = _yarn(rope, plain)
    else:
        scaled = plain
    if rope.freq_factors:
        scaled = [f / divisor for f, divisor in zip(scaled, rope.freq_factors, strict=True)]
    return tuple(scaled)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's default magnitude of cos and sin.

    Source: Peng et al., YaRN (arXiv 2309.00071), equation 22; the mscale pair as DeepSeek's configs use it.
    """
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _llama3(rope: RopeConfig, frequency: float) -> float:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * frequency / (2.0 * math.pi)
    if turns > rope.high_freq_factor:
        return frequency
    if turns < rope.low_freq_factor:
        return frequency / rope.factor
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return (1.0 - blend) * frequency / rope.factor + blend * frequency


def _yarn(rope: RopeConfig, plain: list[float]) -> list[float]:
    """Blends interpolated and kept frequencies along a ramp over the dimensions.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2.
    """
    low = _yarn_dimension(rope, rope.beta_fast)
    high = _yarn_dimension(rope, rope.beta_slow)
    if rope.yarn_truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, rope.rotary_dim - 1.0)
    span = high - low if high != low else 0.001
    ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(plain))]
    return [f / rope.factor * r + f * (1.0 - r) for f, r in zip(plain, ramp, strict=True)]


def _yarn_dimension(rope: RopeConfig, num_turns: float) -> float:
    """The dimension that makes `num_turns` turns within the original context."""
    length = rope.original_max_position_embeddings / (num_turns * 2.0 * math.pi)
    return rope.rotary_dim * math.log(length) / (2.0 * math.log(rope.theta))
