"""The step after a step whose tokens nobody knows yet: one more token for each sequence that surely or likely goes on.

Used by the scheduler, where a device can compute while the host still waits for its last results. Whoever ends with the
step before (a stop token) has computed one token in vain: its row is ignored, and its blocks come free only then.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naru_worker.core.kv_manager import KVManager
from naru_worker.core.request import SequenceState
from naru_worker.core.roster import Roster
from naru_worker.core.scheduler_config import SchedulerConfig
from naru_worker.core.step import Row, StepPlan


class NotAhead(enum.Enum):
    """Why the next step waits for the results of this one."""

    PROMPTS = "the step computes prompts"
    COPIES = "the step copies blocks"
    CHANGED = "the step preempted or ended sequences"
    ARRIVALS = "requests wait that may be let in"
    DRAFTS = "guesses depend on the tokens before them"
    GRAMMAR = "a mask depends on the token before it"
    BEAMS = "beams depend on all candidates"
    LEFT_OUT = "a running sequence has no row"
    ALL_END = "all sequences end with this step"
    MEMORY = "there is no free block"
    SHARED = "other models have work"
    WEIGHTS = "weights are still on their way"
    REFUSED = "the device has no room for it"


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that can be launched before the one before it is committed."""

    plan: StepPlan
    sources: tuple[int, ...]
    """Of each row: the row of the step before that draws its token."""


def plan_ahead(plan: StepPlan, roster: Roster, kv: KVManager, config: SchedulerConfig) -> Ahead | NotAhead:
    """The step behind `plan`; see `Scheduler.plan_ahead`."""
    obstacle = _obstacle_of_step(plan, roster, config)
    if obstacle is not None:
        return obstacle
    rows: list[Row] = []
    sources: list[int] = []
    num_running = 0
    for place, row in enumerate(plan.rows):
        sequence = row.sequence
        if sequence.state is not SequenceState.RUNNING:
            continue
        num_running += 1
        request = sequence.request
        obstacle = NotAhead.BEAMS if request.beams else None if sequence.matcher is None else NotAhead.GRAMMAR
        if obstacle is not None:
            return obstacle
        # Whether the token that is being drawn is the last one, whatever it is.
        num_tokens = len(sequence.token_ids) + 1
        num_output_tokens = num_tokens - len(request.prompt_token_ids)
        if num_output_tokens != request.params.max_tokens and num_tokens < config.max_model_len:
            rows.append(Row(sequence, row.start + 1, 1, samples=True))
            sources.append(place)
    if num_running != len(roster.running):
        return NotAhead.LEFT_OUT
    if not rows:
        return NotAhead.ALL_END
    # Two tokens: that of `plan` is not booked yet.
    if not kv.make_room([(row.sequence, 2) for row in rows]):
        return NotAhead.MEMORY
    for row in rows:
        allocated = kv.allocate(row.sequence, 2)
        assert allocated, "room was counted before"
    return Ahead(StepPlan(tuple(rows)), tuple(sources))


def _obstacle_of_step(plan: StepPlan, roster: Roster, config: SchedulerConfig) -> NotAhead | None:
    obstacles = (
        (not plan.is_decode, NotAhead.PROMPTS),
        (bool(plan.copies), NotAhead.COPIES),
        (bool(plan.preempted or plan.ended), NotAhead.CHANGED),
        (bool(config.max_draft_tokens), NotAhead.DRAFTS),
        (bool(roster.waiting) and roster.has_place, NotAhead.ARRIVALS),
    )
    return next((reason for is_there, reason in obstacles if is_there), None)
