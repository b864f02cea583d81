"""How many bytes of text a token of a model stands for, learned from answered requests; the router has no tokenizer.

Used for estimates alone: a wrong one costs a second-best worker.
"""

from __future__ import annotations

DEFAULT_BYTES_PER_TOKEN = 4.0
"""English prose in today's vocabularies."""
MAX_MODELS = 4096
_SHARE = 0.1
"""Of a new sample in the mean."""
_LOWEST, _HIGHEST = 0.25, 64.0


class TokenSizes:
    """Running means by model. Mutable."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def bytes_per_token(self, model: str) -> float:
        """The mean of a model, in [0.25, 64]."""
        return self._means.get(model, DEFAULT_BYTES_PER_TOKEN)

    def observe(self, model: str, num_bytes: int, num_tokens: int) -> None:
        """Takes one prompt's sizes; one without either is no sample."""
        if num_bytes <= 0 or num_tokens <= 0:
            return
        sample = min(max(num_bytes / num_tokens, _LOWEST), _HIGHEST)
        before = self._means.pop(model, None)
        self._means[model] = sample if before is None else before + (sample - before) * _SHARE
        if len(self._means) > MAX_MODELS:
            del self._means[next(iter(self._means))]  # the one that has rested longest
