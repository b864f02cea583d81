"""One step while it is being planned: what is left of the budget, and the rows so far.

Used by the scheduler within one call of `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from naru_worker.core.request import Sequence
from naru_worker.core.step import Row, StepPlan


@dataclass(slots=True)
class Share:
    """What one sequence computes in this step."""

    sequence: Sequence
    num_missing: int
    num_tokens: int
    drafts: tuple[int, ...] = ()


def run_limit(sequence: Sequence, num_computed_tokens: int) -> int:
    """Most tokens of the sequence's next row: a row holds prompt tokens or generated ones, never both.

    Backends may compute the two kinds in different ways, and a sequence that is computed again after preemption must
    get the numbers it had.
    """
    num_prompt_tokens = sequence.num_prompt_tokens
    if num_computed_tokens < num_prompt_tokens:
        return num_prompt_tokens - num_computed_tokens
    return len(sequence.token_ids) - num_computed_tokens


@dataclass(slots=True)
class StepDraft:
    """Budget and rows. `long_share`: see `SchedulerConfig.long_prefill_chunk_tokens`."""

    num_tokens_left: int
    long_share: int
    num_decodes_left: int
    """Running sequences still to come that miss one token: nobody before them may take their place."""
    num_long_left: int = field(init=False)
    shares: list[Share] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    is_starved: bool = False

    def __post_init__(self) -> None:
        """Starts with the whole share."""
        self.num_long_left = self.long_share

    def allowance(self, num_missing: int) -> int:
        """Tokens that a sequence missing so many may compute; 0: none in this step."""
        allowed = min(num_missing, self.num_tokens_left - self.num_decodes_left)
        if num_missing > self.long_share:
            allowed = min(allowed, self.num_long_left)
        return allowed

    def take(self, sequence: Sequence, num_missing: int, num_tokens: int) -> None:
        """Books a row; with 0 tokens, one that gets leftovers only."""
        self.shares.append(Share(sequence, num_missing, num_tokens))
        self.num_tokens_left -= num_tokens
        if num_missing > self.long_share:
            self.num_long_left -= num_tokens

    def drop(self, num_shares: int) -> None:
        """Takes the last rows back."""
        for share in self.shares[-num_shares:]:
            self.num_tokens_left += share.num_tokens
            if share.num_missing > self.long_share:
                self.num_long_left += share.num_tokens
        del self.shares[-num_shares:]

    @property
    def is_empty(self) -> bool:
        """Whether no token was booked yet."""
        return all(share.num_tokens == 0 for share in self.shares)

    def plan(self, copies: tuple[tuple[int, int], ...]) -> StepPlan:
        """The finished plan: generated tokens first, single ones before runs; order kept within each kind."""
        kinds: tuple[list[Row], list[Row], list[Row], list[Row]] = ([], [], [], [])
        for share in self.shares:
            sequence, num_tokens = share.sequence, share.num_tokens
            if num_tokens == 0:
                continue
            samples = num_tokens == share.num_missing and sequence.request.params.max_tokens != 0
            drafts = share.drafts
            row = Row(sequence, sequence.num_computed_tokens, num_tokens + len(drafts), samples, drafts)
            kinds[2 * row.is_prompt + (row.num_tokens > 1)].append(row)
        rows = tuple(row for kind in kinds for row in kind)
        return StepPlan(rows, copies, tuple(self.preempted), tuple(self.ended), self.is_starved)
