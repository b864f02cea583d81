"""Numbers of one model's engine: written by the engine thread, read by any other.

Plain integers and lists: a reader may see a step half counted, never a broken value. Histograms are kept here and not
in the metrics library, as that takes a lock and a microsecond for each observation.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """Counts of observations by bucket; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Adds an observation; bounds are inclusive."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class EngineStats:
    """Sums since the model was loaded, and the numbers of this instant (`num_running` to `decode_step_s`)."""

    num_blocks: int
    """Usable ones, without the null block: the most there will ever be."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    """Of the most: blocks without memory count as free."""
    kv_committed_bytes: int = 0
    """Memory the KV cache has now; 0 where it neither grows nor shrinks."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are neither cached nor computed yet."""
    prefill_tokens_per_s: float = 0.0
    """Measured; see `core.step_rates`. 0: not yet."""
    decode_step_s: float = 0.0
    num_taken: int = 0
    """Requests that were handed in, refused ones too. Counted once the numbers above count them."""
    num_kv_grows: int = 0
    num_kv_shrinks: int = 0
    compute_s: float = 0.0
    """Time of the engine thread spent on this model's steps."""
    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed tokens that were computed; see `core.speculation`."""
    accepted_tokens: int = 0
    """Of these, the ones that were drawn."""
    draft_reasons: dict[str, int] = field(default_factory=dict)
    """Steps that decode, by why they had drafts or none; empty where there is no speculation."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that began, cached ones included."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by how they ended: the finish reason of the first choice, or error."""
    ttft_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    itl_s: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS_S))
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    e2e_s: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    batch_rows: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    """Of models that do not generate: places taken of each batch."""
    batch_wait_s: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS_S))
    """And how long each input waited for its batch."""

    @property
    def kv_usage_ratio(self) -> float:
        """Used blocks per block that there may ever be, in [0, 1]: how much more the model can take in itself.

        Whether there is memory for it is the ledger's to say.
        """
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
