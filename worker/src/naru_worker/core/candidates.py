"""What a beam search needs of one position: the likeliest next tokens. Made by the engine, kept with the beam."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidates:
    """Best first, ties by lower id, with their raw log probabilities."""

    token_ids: list[int]
    logprobs: list[float]
