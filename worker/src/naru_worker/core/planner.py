"""Plans one step: who computes how many tokens, who is let in, who must give way.

Used by the scheduler. Running sequences come first, in order; a sequence that misses one token (a decode) always gets
it. Then waiting ones are let in while budget, places and blocks last.

Source: iteration-level scheduling (Yu et al., Orca, OSDI 2022) with chunked prefill (Agrawal et al., Sarathi-Serve,
OSDI 2024) under one token budget.
"""

from __future__ import annotations

import math

from naru_worker.core.kv_manager import NO_MATCH, KVManager, PrefixMatch
from naru_worker.core.prompt_logprobs import PromptLogprobs
from naru_worker.core.request import FinishReason, Sequence, SequenceState
from naru_worker.core.roster import Roster
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.scheduler_counters import SchedulerCounters
from naru_worker.core.sequence_queue import SequenceQueue, order_key
from naru_worker.core.speculation import Speculation
from naru_worker.core.step import StepPlan
from naru_worker.core.step_budget import StepPace, step_budget
from naru_worker.core.step_draft import StepDraft, run_limit

MAX_PASSED_OVER = 64
"""Waiting sequences that one plan looks at and leaves waiting: bounds its time however long the queue is."""


class Planner:
    """Writes plans; changes states and blocks through roster and KV manager."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        roster: Roster,
        prompt_logprobs: PromptLogprobs,
        counters: SchedulerCounters,
        speculation: Speculation | None = None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._prompt_logprobs = prompt_logprobs
        self._counters = counters
        self._speculation = speculation

    def plan(self, pace: StepPace | None = None) -> StepPlan:
        """The next step; `pace` cuts it to what was measured."""
        self._kv.forget_copies()
        num_decodes = self._num_decodes
        num_prompts = len(self._roster.running) - num_decodes + len(self._roster.waiting)
        num_tokens = step_budget(self._config, pace, num_decodes, num_prompts)
        draft = StepDraft(num_tokens, self._config.long_share(num_tokens), num_decodes)
        waiting = self._roster.waiting
        self._plan_running(draft, waiting[0].request.priority if waiting else None)
        if not draft.preempted:
            self._plan_waiting(draft)
            self._give_leftovers(draft)
            if self._speculation is not None:
                self._speculation.add_drafts(draft)
        if draft.is_empty and not draft.ended:
            # The important one found no room, and those held back for it no blocks: they go on at others' cost.
            draft.num_decodes_left = self._num_decodes
            self._plan_running(draft, None)
        has_work = bool(self._roster.running) or bool(self._roster.waiting)
        draft.is_starved = draft.is_empty and not draft.ended and has_work
        return draft.plan(self._kv.copies())

    @property
    def _num_decodes(self) -> int:
        return sum(1 for s in self._roster.running if len(s.token_ids) - s.num_computed_tokens == 1)

    @property
    def _num_watermark_blocks(self) -> int:
        return math.ceil(self._config.watermark_ratio * self._kv.num_usable_blocks)

    def _plan_running(self, draft: StepDraft, priority_waiting: int | None) -> None:
        """Books running sequences. Prompts less important than who waits first get only what that one leaves."""
        running = self._roster.running
        index = 0
        while index < len(running):
            sequence = running[index]
            if sequence.request.beams:
                index += self._plan_beams(_beams_at(running, index), draft, priority_waiting)
                continue
            num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
            if num_missing == 1:
                draft.num_decodes_left -= 1
            is_held = priority_waiting is not None and sequence.request.priority > priority_waiting and num_missing > 1
            limit = 0 if is_held else run_limit(sequence, sequence.num_computed_tokens)
            num_tokens = min(limit, draft.allowance(num_missing))
            if num_tokens == 0 or self._make_room(sequence, num_tokens, draft):
                draft.take(sequence, num_missing, num_tokens)
            # Where it had to go itself it was the last, and the loop ends.
            index += 1

    def _make_room(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Allocates for a running sequence, preempting from the end of the order; False: it lost its own place."""
        while not self._kv.allocate(sequence, num_tokens):
            is_alone = len(self._roster.running) == 1
            if is_alone and not self._kv.can_ever_fit(sequence.num_computed_tokens + num_tokens):
                # It has the pool for itself and has outgrown it.
                self._end_outgrown(sequence, draft)
                return False
            # Alone, it waits for memory that other models hold, and leaves them its own: two models that each wait for
            # the other's would wait for ever. Rows are booked in order: the victim has no row and no copy in this plan.
            if sequence in self._preempt_last(draft):
                return False
        return True

    def _preempt_last(self, draft: StepDraft) -> list[Sequence]:
        victims = self._roster.preempt_last()
        self._counters.num_preemptions += len(victims)
        draft.preempted.extend(victims)
        return victims

    def _plan_beams(self, beams: list[Sequence], draft: StepDraft, priority_waiting: int | None) -> int:
        """Books the running beams of a request, all of them or none; returns how many there were.

        None is booked before all have blocks: should they have to give way, they do so together.
        """
        is_held = priority_waiting is not None and beams[0].request.priority > priority_waiting
        wanted = []
        for sequence in beams:
            num_missing = sequence.num_missing_tokens
            if num_missing == 1:
                draft.num_decodes_left -= 1
            limit = 0 if is_held and num_missing > 1 else run_limit(sequence, sequence.num_computed_tokens)
            num_tokens = min(limit, draft.allowance(num_missing))
            draft.take(sequence, num_missing, num_tokens)
            wanted.append((sequence, num_tokens))
        while not self._kv.make_room(wanted):
            # Alone they always fit, if all memory is there: see `max_beam_tokens`.
            if beams[0] in self._preempt_last(draft):
                draft.drop(len(beams))
                return len(beams)
        for sequence, num_tokens in wanted:
            allocated = num_tokens == 0 or self._kv.allocate(sequence, num_tokens)
            assert allocated, "room was counted before"
        return len(beams)

    def _plan_waiting(self, draft: StepDraft) -> None:
        roster = self._roster
        waiting = roster.waiting
        num_spare = 0
        if waiting and roster.running:
            num_spare = self._num_watermark_blocks + sum(self._num_blocks_to_come(s) for s in roster.running)
        index = 0
        while index < min(len(waiting), MAX_PASSED_OVER) and draft.num_tokens_left > 0 and roster.has_place:
            sequence = waiting[index]
            if not self._kv.can_ever_fit(len(sequence.token_ids)):
                # It was preempted when it needed one block more than there are.
                self._end_outgrown(sequence, draft)
                continue
            match = self._match(sequence)
            num_missing = len(sequence.token_ids) - match.num_tokens
            limit = 0 if match.awaited_hash is not None else run_limit(sequence, match.num_tokens)
            num_tokens = min(limit, draft.allowance(num_missing))
            if num_tokens == 0:
                index += 1
                continue
            if not roster.has_places_for(sequence.request):
                break  # a beam search needs some at once; were others let in before it, it might never have them
            if not self._kv.admit(sequence, match, num_tokens, num_spare + self._num_blocks_of_mates(sequence)):
                break
            roster.start(index)
            self._count_match(sequence, match)
            draft.take(sequence, num_missing, num_tokens)
            num_spare = max(num_spare, self._num_watermark_blocks) + self._num_blocks_to_come(sequence)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        # Cached positions have no logits to score the next prompt token with.
        if sequence.request.skip_prefix_cache or self._prompt_logprobs.is_open(sequence):
            return NO_MATCH
        awaited = self._roster.awaited.get(sequence)
        if awaited is not None:
            if self._kv.is_computing(awaited):
                return PrefixMatch(awaited_hash=awaited)
            del self._roster.awaited[sequence]
        match = self._kv.match(sequence)
        if match.awaited_hash is not None:
            self._roster.awaited[sequence] = match.awaited_hash
        return match

    def _count_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Once a request, when its first sequence starts for the first time."""
        if sequence.index == 0 and sequence.num_preemptions == 0:
            # Prior output may be found as well, and is no part of the prompt.
            num_cached = min(match.num_tokens, sequence.num_prompt_tokens)
            sequence.request.num_cached_tokens = num_cached
            self._counters.prefix_query_tokens += sequence.num_prompt_tokens
            self._counters.prefix_hit_tokens += num_cached

    def _num_blocks_to_come(self, sequence: Sequence) -> int:
        """Blocks that known tokens of a running sequence will still need."""
        num_own = max(0, self._kv.num_blocks_for(len(sequence.token_ids)) - len(sequence.block_table))
        return num_own + self._num_blocks_of_mates(sequence) if sequence.request.beams else num_own

    def _num_blocks_of_mates(self, sequence: Sequence) -> int:
        """At most so many blocks are needed by beams that wait for this one to be computed again."""
        beams = sequence.request.beams
        if len(beams) < 2 or sequence is not beams[0] or beams[1].state is not SequenceState.FORKING:
            return 0
        num_shared = sequence.num_prompt_tokens // self._kv.block_size
        return (len(beams) - 1) * (self._kv.num_blocks_for(len(sequence.token_ids)) - num_shared)

    def _give_leftovers(self, draft: StepDraft) -> None:
        """Lets prompts that were held short use what nobody else wanted, the most important first."""
        short = [share for share in draft.shares if share.num_tokens < share.num_missing]
        short.sort(key=lambda share: order_key(share.sequence))
        for share in short:
            limit = run_limit(share.sequence, share.sequence.num_computed_tokens)
            num_more = min(limit - share.num_tokens, draft.num_tokens_left)
            if num_more > 0 and self._kv.allocate(share.sequence, share.num_tokens + num_more):
                share.num_tokens += num_more
                draft.num_tokens_left -= num_more

    def _end_outgrown(self, sequence: Sequence, draft: StepDraft) -> None:
        self._roster.end(sequence, FinishReason.LENGTH)
        draft.ended.append(sequence)


def _beams_at(running: SequenceQueue, index: int) -> list[Sequence]:
    """The beams of one request that run: they stand side by side."""
    request = running[index].request
    end = index
    while end < len(running) and running[end].request is request:
        end += 1
    return [running[place] for place in range(index, end)]
