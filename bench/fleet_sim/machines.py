"""The machines of a simulated fleet: how fast they compute and how much they cache. Plain values.

Called by the traces and the engines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker's engine. A step takes ``step_s + sequences x sequence_s + prompt tokens ÷ prefill_tokens_per_s``."""

    name: str
    title: str
    prefill_tokens_per_s: float
    step_s: float
    """Of any step, before its sequences and prompt tokens."""
    sequence_s: float
    """What each decoding sequence adds to it."""
    max_step_tokens: int
    """Decoding sequences and prompt tokens of one step."""
    max_sequences: int
    cache_tokens: int
    """KV of running requests and cached prefixes together."""

    def decode_step_s(self, num_sequences: int) -> float:
        """A step without prompt tokens."""
        return self.step_s + num_sequences * self.sequence_s

    def wait_s(self, num_tokens: float, num_sequences: int) -> float:
        """Until so many prompt tokens are computed beside so many decoding sequences."""
        room = max(1, self.max_step_tokens - num_sequences)
        num_steps = max(1, -(-int(num_tokens) // room))
        return num_steps * self.decode_step_s(num_sequences) + num_tokens / self.prefill_tokens_per_s


GPU = Machine(
    "gpu",
    "a GPU that shares its memory with other models",
    prefill_tokens_per_s=12_000.0,
    step_s=0.012,
    sequence_s=0.000_06,
    max_step_tokens=2048,
    max_sequences=128,
    cache_tokens=96_000,
)
"""Of the size of an 8 billion parameter model in 16 bit on one accelerator of 80 GB; assumed, not measured."""

CPU = Machine(
    "cpu",
    "two CPU cores, a model of 135 million parameters",
    prefill_tokens_per_s=2400.0,
    step_s=0.0037,
    sequence_s=0.0007,
    max_step_tokens=256,
    max_sequences=32,
    cache_tokens=32_000,
)
"""As Naru's CPU engine was measured with SmolLM2-135M in bench/results/engine.json."""
