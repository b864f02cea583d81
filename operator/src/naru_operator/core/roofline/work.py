"""The work of a step: what its kernels move and compute, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one kernel over all its launches in a step."""

    name: str
    launches: int
    bytes: int
    operations: int
    """Of the tensor cores; what else is computed never decides."""
    is_fp8: bool = False
    """Whether the FP8 units can do it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step computes: as many new tokens of every sequence, after what is cached of it."""

    num_sequences: int
    new_tokens: int
    """Of each sequence: 1 in a step that generates."""
    cached_tokens: int
    """Of each sequence, before the step."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.num_sequences * self.new_tokens
