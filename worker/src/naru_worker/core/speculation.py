"""Gives sequences that decode drafts: guessed tokens that are computed and drawn in one step with the next one.

Called by the planner when everything else has its place, so that drafts take from nobody: no budget that a prompt could
use, no block that needs another sequence's. A draft that turns out wrong costs its row, never a token: each position is
drawn as it would have been, and what follows a wrong guess is thrown away.

Source: draft and verify (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding",
ICML 2023), with drafts from the text itself and draws that must be equal, so that sampled output is the same, too.
"""

from __future__ import annotations

from naru_worker.core.draft_choice import DraftReason, choose_drafts, least_chance
from naru_worker.core.draft_odds import DraftOdds
from naru_worker.core.draft_source import DraftSource
from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import Sequence
from naru_worker.core.row_costs import RowCosts
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.scheduler_counters import SchedulerCounters
from naru_worker.core.step_draft import Share, StepDraft

MAX_SEQUENCES = 32
"""Sequences in a step among which guesses are looked for: beyond, rows are hardly cheaper than steps."""
_HALF_LIFE_GUESSES = 512.0
"""Of a model's odds, from which new sequences start."""


class Speculation:
    """Drafts of one model's steps. `costs` is fed from outside."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, counters: SchedulerCounters) -> None:
        self.costs = RowCosts()
        self._config = config
        self._kv = kv
        self._counters = counters
        self._odds = DraftOdds(_HALF_LIFE_GUESSES)
        counters.draft_reasons.update(dict.fromkeys((reason.value for reason in DraftReason), 0))

    def add_drafts(self, draft: StepDraft) -> None:
        """Adds drafts to rows that decode, as far as they pay and there is room."""
        decodes = [share for share in draft.shares if share.num_missing == 1 == share.num_tokens]
        if not decodes:
            return
        if len(decodes) > MAX_SEQUENCES:
            reason = DraftReason.LARGE_BATCH
        else:
            reason = self._choose(draft, decodes)
        self._counters.draft_reasons[reason.value] += 1

    def _choose(self, draft: StepDraft, decodes: list[Share]) -> DraftReason:
        guessing: list[tuple[Share, DraftSource]] = []
        for share in decodes:
            sequence = share.sequence
            if not _may_guess(sequence):
                continue
            source = sequence.draft_source
            if source is None:
                source = sequence.draft_source = DraftSource(self._odds)
            if source.catch_up(sequence.token_ids):
                guessing.append((share, source))
        count = len(decodes)
        least = least_chance(count, count, self.costs)
        odds = [source.odds(self._limit(share.sequence), least) for share, source in guessing]
        choice = choose_drafts(odds, count, count, self.costs, draft.num_tokens_left)
        if choice.reason is not DraftReason.PAYS:
            return choice.reason
        reason = DraftReason.NO_ROOM
        for (share, source), count in zip(guessing, choice.num_drafts, strict=True):
            num_drafts = self._kv.allocate_spare(share.sequence, 1, count)
            if num_drafts:
                share.drafts = source.drafts(share.sequence.token_ids, num_drafts)
                draft.num_tokens_left -= num_drafts
                self._counters.drafted_tokens += num_drafts
                reason = DraftReason.PAYS
        return reason

    def _limit(self, sequence: Sequence) -> int:
        """Most drafts that could all be output: the token after them is, too."""
        num_left = self._config.max_model_len - len(sequence.token_ids)
        max_tokens = sequence.request.params.max_tokens
        if max_tokens is not None:
            num_left = min(num_left, max_tokens - sequence.num_output_tokens)
        return max(0, min(self._config.max_draft_tokens, num_left - 1))


def _may_guess(sequence: Sequence) -> bool:
    """A prompt's last token is computed as a prompt; beams part; a grammar's mask is of the next token alone."""
    return (
        sequence.num_computed_tokens >= sequence.num_prompt_tokens
        and sequence.matcher is None
        and not sequence.request.beams
    )
