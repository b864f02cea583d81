"""What a scheduler has done since it was made; the worker's metrics read it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerCounters:
    """Sums; they only grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache, once a request."""
    prefix_hit_tokens: int = 0
    prefilled_tokens: int = 0
    """Tokens computed in rows of more than one: prompts, and recomputation after preemption."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed tokens that were computed; see `core.speculation`."""
    accepted_tokens: int = 0
    """Of these, the ones that were drawn."""
    draft_reasons: dict[str, int] = field(default_factory=dict)
    """Steps that decode, by why they had drafts or none: values of `DraftReason`. All of them from the beginning."""
