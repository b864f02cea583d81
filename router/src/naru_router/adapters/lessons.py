"""What answered requests teach: a prompt's length in tokens, how much of it was cached, how far estimates were off.

Told by the dispatcher; the job maker reads the sizes, Prometheus the rest.
"""

from __future__ import annotations

from naru_router.adapters.course import Job
from naru_router.adapters.metrics import Metrics
from naru_router.core.token_sizes import TokenSizes
from naru_router.core.transcript import Transcript

MAX_PUT_ASIDE = 256
"""Requests that are counted together: it takes a fifth of the time of counting each at its end."""


class Lessons:
    """Takes them. Mutable."""

    def __init__(self, sizes: TokenSizes, metrics: Metrics) -> None:
        self._sizes = sizes
        self._metrics = metrics
        self._put_aside: list[tuple[str, int, int, int | None]] = []
        """Model, as people call it, prompt tokens, cached ones, and those expected."""
        metrics.write_before_reading(self._write)

    def take(self, job: Job, transcript: Transcript, expected_cached_tokens: int | None) -> None:
        """A request was answered; `expected_cached_tokens` None: nothing was expected of the worker that did."""
        num_tokens = transcript.prompt_tokens
        if not num_tokens or job.is_knock:
            return
        self._sizes.observe(job.model, job.num_bytes, num_tokens)
        self._put_aside.append((job.label, num_tokens, max(0, transcript.cached_tokens), expected_cached_tokens))
        if len(self._put_aside) >= MAX_PUT_ASIDE:
            self._write()

    def _write(self) -> None:
        metrics = self._metrics
        for label, num_tokens, cached_tokens, expected in self._put_aside:
            metrics.prompt_tokens.labels(label).inc(num_tokens)
            metrics.cached_tokens.labels(label).inc(cached_tokens)
            if expected is not None:
                metrics.cached_tokens_error.labels(label).observe(abs(cached_tokens - expected))
        self._put_aside.clear()
