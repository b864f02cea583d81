"""How far one engine's next-token distributions are from those of float32: perplexity and KL divergence. Pure.

Every set of logits is treated alike: what lies more than 16 below a row's largest logit is raised to that, which is how
llama-perplexity stores its own; a probability below 1e-7 of the most likely token's says nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench.stats import percentile

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

FLOOR = 16.0
"""Logits further than this below the row's largest count as being there."""
_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Divergence:
    """One engine in one setting against the reference, over all rows."""

    perplexity: float
    """Of the text, by this engine."""
    mean_kl: float
    """Mean over rows of KL(reference ‖ this), in nats."""
    p99_kl: float
    max_kl: float
    same_top: float
    """Part of the rows whose most likely token is the reference's, 0 to 1."""


def log_probabilities(logits: FloatArray) -> FloatArray:
    """Log-softmax of (R, vocab) logits, normalized over what was given, then raised to the floor."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result = np.maximum(shifted, -FLOOR) - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows: FloatArray = result.astype(np.float32)
    return rows


def kl_rows(reference: FloatArray, other: FloatArray) -> npt.NDArray[np.float64]:
    """KL(reference ‖ other) of each row of (R, vocab) log probabilities, in nats."""
    pieces = [np.zeros(0)]
    for rows in _slices(len(reference)):
        ours, theirs = reference[rows].astype(np.float64), other[rows].astype(np.float64)
        pieces.append((np.exp(ours) * (ours - theirs)).sum(axis=1))
    return np.concatenate(pieces)


def perplexity(log_probs: FloatArray, targets: IntArray) -> float:
    """Of the tokens that came next. `targets` is (R,)."""
    return float(np.exp(-log_probs[np.arange(len(targets)), targets].astype(np.float64).mean()))


def divergence(reference: FloatArray, other: FloatArray, targets: IntArray) -> Divergence:
    """Compares (R, vocab) log probabilities over the same rows; `targets` are the tokens that came next.

    Raises:
        ValueError: the shapes differ, or a value is not finite.
    """
    if reference.shape != other.shape or len(targets) != len(reference):
        raise ValueError(f"{other.shape} log probabilities cannot be compared with {reference.shape}")
    if not np.isfinite(other).all():
        raise ValueError("log probabilities hold values that are not finite")
    kl = kl_rows(reference, other)
    return Divergence(
        perplexity=perplexity(other, targets),
        mean_kl=float(kl.mean()),
        p99_kl=percentile(kl.tolist(), 99),
        max_kl=float(kl.max()),
        same_top=float((reference.argmax(axis=1) == other.argmax(axis=1)).mean()),
    )


def _slices(num_rows: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE))
