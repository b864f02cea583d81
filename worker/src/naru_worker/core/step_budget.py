"""How many tokens one step may compute, from how fast the model was measured to be. Pure.

Called by the planner. Long steps are the cheap ones: weights are unpacked once for more rows, and less goes by between
steps. But a step is the gap between two tokens of every running stream, and what comes meanwhile waits for its end. So
it is as long as those who wait for it allow: with streams `target_itl_s`, longer while prompts outnumber them, and
without any `ALONE_STEP_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from naru_worker.core.scheduler_config import SchedulerConfig

ALONE_STEP_S = 0.4
"""Of a step that no stream waits for: how long a new request, or a cancel, waits for its turn."""
FIRST_TOKENS = 256
"""Prompt tokens of a step before anything was measured."""
LEAST_TOKENS = 64
"""Prompt tokens of a step however slow they are: fewer take as long, as the weights are read once a step."""
_COARSE_TOKENS = 512
"""Backends cut long steps into pieces of so many; a piece that is not full costs almost as much."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """What was measured of a model, and who waits."""

    prefill_tokens_per_s: float = 0.0
    """0: not measured yet."""
    decode_step_s: float = 0.0
    """Of a step that only decodes; 0: not measured yet."""
    is_shared: bool = False
    """Other models have work too: their streams wait for this step."""


def step_budget(config: SchedulerConfig, pace: StepPace | None, num_decodes: int, num_prompts: int) -> int:
    """Tokens of the next step, prompts and `num_decodes` single ones together, within the configured most.

    `num_prompts`: sequences that wait for their first token. Beside streams they get what the target leaves after the
    decodes, and at least as long as those take: decodes that are slow by themselves must not starve prompts. Without
    a pace: the configured most.
    """
    most = config.max_num_batched_tokens
    if pace is None:
        return most
    if pace.prefill_tokens_per_s <= 0.0:
        return min(most, num_decodes + FIRST_TOKENS)
    target_s = config.target_itl_s
    seconds = target_s if pace.is_shared else max(ALONE_STEP_S, target_s)
    if num_decodes:
        gap_s = min(target_s * max(1.0, num_prompts / num_decodes), seconds)
        seconds = max(gap_s - pace.decode_step_s, pace.decode_step_s)
    return min(most, num_decodes + _even(max(LEAST_TOKENS, int(seconds * pace.prefill_tokens_per_s))))


def _even(num_tokens: int) -> int:
    step = _COARSE_TOKENS if num_tokens >= _COARSE_TOKENS else LEAST_TOKENS
    return num_tokens - num_tokens % step
