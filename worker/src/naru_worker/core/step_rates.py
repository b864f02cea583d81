"""How fast one model computes, measured step by step: prompt tokens a second, and seconds of a step that decodes.

Fed by the engine after each step; routers estimate waiting times by it. Both are means that forget: prefill by tokens,
so that many short prompts weigh no more than the long ones they stand beside; decode by steps. In a mixed step the
decodes are taken to cost what they cost alone, and the rest of its time is the prompts'. Until a step has only decoded,
mixed steps count for the prompts as a whole. What a step waited for (weights on their way) is not to be told here.

Not every step says how fast prompts are computed: one with a handful of prompt tokens (what is left of cached ones)
takes what any step takes, and the first one after a load fetches the weights from memory. Taken for a rate, either
would make a queue of short prompts look like minutes.
"""

from __future__ import annotations

PREFILL_HALF_LIFE_TOKENS = 4096.0
DECODE_HALF_LIFE_STEPS = 32.0
MIN_SAMPLE_TOKENS = 32
"""Prompt tokens of a step that is a sample."""
MIN_TOKENS = 256
"""In all samples, before a rate is told."""
_LEAST_SHARE = 0.1
"""Of a mixed step that is the prompts' at least, however slow decodes were."""


class StepRates:
    """Mutable. Numbers are 0 until measured."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._num_tokens = 0
        self._is_warm = False

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed in a second that computes nothing else."""
        return self._tokens / self._seconds if self._num_tokens >= MIN_TOKENS else 0.0

    def observe(self, num_prefill_tokens: int, num_decodes: int, step_s: float) -> None:
        """One step: tokens of prompts, sequences that decoded, and what it took; a step without time is no sample."""
        if step_s <= 0.0:
            return
        if not num_prefill_tokens:
            if num_decodes:
                self._observe_decode(step_s)
            return
        if num_prefill_tokens < MIN_SAMPLE_TOKENS:
            return
        if not self._is_warm:
            self._is_warm = True
            return
        prefill_s = step_s
        if num_decodes:
            prefill_s = max(step_s - self.decode_step_s, _LEAST_SHARE * step_s)
        kept = 0.5 ** (num_prefill_tokens / PREFILL_HALF_LIFE_TOKENS)
        self._num_tokens += num_prefill_tokens
        self._tokens = self._tokens * kept + num_prefill_tokens
        self._seconds = self._seconds * kept + prefill_s

    def _observe_decode(self, step_s: float) -> None:
        if self.decode_step_s == 0.0:
            self.decode_step_s = step_s
        else:
            self.decode_step_s += (step_s - self.decode_step_s) * (1.0 - 0.5 ** (1.0 / DECODE_HALF_LIFE_STEPS))
