"""The scheduler's limits, one frozen record. Built by the worker's wiring from its settings and the loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one model's scheduler.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    max_num_seqs: int
    """Sequences that run at once; each choice of a request counts."""
    max_num_batched_tokens: int
    """Tokens computed in one step, prompts and decodes together. At least `max_num_seqs`, so that every running
    sequence can decode in every step."""
    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    eos_token_ids: tuple[int, ...] = ()
    """Any of them ends a sequence (the union of all sources), unless the request ignores EOS."""
    vocab_size: int | None = None
    """Prompt ids must be below it: rows of the embedding. None checks only that an id is an unsigned 31-bit number."""
    watermark_ratio: float = 0.01
    """Share of the blocks that admission leaves free for running sequences to grow into, in [0, 1). Without it a
    request would be let in only to be preempted at once."""
    long_prefill_chunk_tokens: int | None = None
    """What prompts with more missing tokens than this may take of a step, together, before all others had their share;
    they get what is left over. None: half of the step's tokens."""
    max_draft_tokens: int = 0
    """Most guessed tokens that a sequence computes in one step beside its next one, where they pay; 0: none."""
    target_itl_s: float = 0.2
    """Gap between two tokens of a stream that prompts beside it are cut to keep, where they can; see `step_budget`."""

    def __post_init__(self) -> None:
        """Checks every field."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} is {value!r}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens!r}, below max_num_seqs {self.max_num_seqs!r}; "
                "raise it, or not every running sequence could decode in every step"
            )
        if not 0.0 <= self.watermark_ratio < 1.0:
            raise ValueError(f"watermark_ratio is {self.watermark_ratio!r}; it must be in [0, 1)")
        if self.long_prefill_chunk_tokens is not None and self.long_prefill_chunk_tokens < 1:
            raise ValueError(
                f"long_prefill_chunk_tokens is {self.long_prefill_chunk_tokens!r}; it must be at least 1, or None"
            )
        if self.target_itl_s <= 0.0:
            raise ValueError(f"target_itl_s is {self.target_itl_s!r}; it must be above 0")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens!r}; it must be at least 0")

    def long_share(self, num_step_tokens: int) -> int:
        """`long_prefill_chunk_tokens` with its default filled in, in tokens, for a step of so many."""
        if self.long_prefill_chunk_tokens is None:
            return max(1, num_step_tokens // 2)
        return self.long_prefill_chunk_tokens
