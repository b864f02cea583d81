"""Runs steps so that the device always has the next one: it is launched before the host waits for this one's tokens.

    launch N ─► launch N+1, whose tokens are N's on the device ─► fetch N ─► commit N ─► launch N+2 ─► fetch N+1 ─► …

Nothing is decided ahead that tokens could change: what comes ahead is one more token of each sequence that goes on, in
its order, so the tokens are those of the plain loop. Whenever more is to be decided the step in flight is committed
first. Used by one model's engine in its thread, where its runner can launch.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeGuard

from naru_worker.adapters.engine.batch import BatchBuilder
from naru_worker.adapters.engine.grammar_masks import MaskJob
from naru_worker.adapters.engine.sampling_rows import RowRequest, SamplingBuilder, SequenceSampling
from naru_worker.adapters.ops.protocol import BatchInputs, LaunchingRunner, Runner, SampleOutput, SamplingBatch
from naru_worker.core.ahead import Ahead, NotAhead
from naru_worker.core.request import Sequence
from naru_worker.core.scheduler import Scheduler
from naru_worker.core.step import StepPlan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """A step ready to run, once or again: its arrays stay as they are until the next one is built."""

    plan: StepPlan
    wanted: list[RowRequest]
    batch: BatchInputs
    sampling: SamplingBatch
    masks: MaskJob | None = None
    """Token masks of its rows, which are computed while it runs."""
    handle: Any = None
    """Of the runner, where it was launched before its turn: its arrays are void."""


def can_launch(runner: Runner) -> TypeGuard[LaunchingRunner]:
    """Whether a runner takes a step before it has given the results of the one before."""
    return hasattr(runner, "launch") and hasattr(runner, "fetch")


class StepsAhead:
    """At most one step in flight between two calls of `run`."""

    def __init__(
        self,
        runner: LaunchingRunner,
        scheduler: Scheduler,
        batches: BatchBuilder,
        samplings: SamplingBuilder,
        states: dict[Sequence, SequenceSampling],
    ) -> None:
        """All are the engine's own."""
        self.num_ahead = 0
        """Steps that were launched before their turn."""
        self.not_ahead: Counter[NotAhead] = Counter()
        """Steps behind which none was, by the reason."""
        self._runner = runner
        self._scheduler = scheduler
        self._batches = batches
        self._samplings = samplings
        self._states = states
        self._flight: BuiltStep | None = None

    @property
    def reasons(self) -> dict[str, int]:
        """Steps by whether the next one was launched before their turn, or why not; the same keys each time."""
        return {"ahead": self.num_ahead} | {reason.name.lower(): self.not_ahead[reason] for reason in NotAhead}

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight: it is the next one to be run."""
        return self._flight is not None

    def take(self) -> BuiltStep | None:
        """The step in flight, to be given to `run` at once."""
        flight, self._flight = self._flight, None
        return flight

    def run(self, built: BuiltStep, *, is_alone: bool) -> SampleOutput:
        """Runs a step, and launches the one behind it if that is sure and nobody else waits for the device.

        Raises:
            WeightsPending: weights are still on their way; nothing was launched.
            Exception: whatever the runner raises; then nothing is in flight.
        """
        handle = built.handle
        if handle is None:
            handle = self._runner.launch(built.batch, built.sampling)
        try:
            reason = self._launch_behind(built.plan, is_alone=is_alone)
            if reason is not None:
                self.not_ahead[reason] += 1
            return self._runner.fetch(handle)
        except Exception:
            self._abandon()
            raise
        finally:
            self._scheduler.kv.is_in_flight = self._flight is not None

    def _launch_behind(self, plan: StepPlan, *, is_alone: bool) -> NotAhead | None:
        if not is_alone:
            return NotAhead.SHARED
        if not self._runner.is_ready:
            return NotAhead.WEIGHTS
        ahead = self._scheduler.plan_ahead(plan)
        if isinstance(ahead, NotAhead):
            return ahead
        try:
            self._flight = self._launched(ahead)
        except Exception as exc:
            # It may succeed in its turn, when others have ended; if not it fails there, and its requests with it.
            _log.warning("a step could not be launched ahead: %s: %s", type(exc).__name__, exc)
            self._scheduler.forgo(ahead)
            return NotAhead.REFUSED
        self.num_ahead += 1
        return None

    def _launched(self, ahead: Ahead) -> BuiltStep:
        states = [self._states[row.sequence] for row in ahead.plan.rows]
        # The token that is being drawn counts as drawn, like a draft; for penalties the runner counts it.
        sampling = self._samplings.build([state.draw(1) for state in states])
        batch = self._batches.build(ahead.plan, list(range(len(states))), ahead.sources)
        handle = self._runner.launch(batch, sampling)
        return BuiltStep(ahead.plan, [state.draws[0] for state in states], batch, sampling, handle=handle)

    def _abandon(self) -> None:
        """Waits until the step in flight is over, which may fail as well."""
        flight = self.take()
        if flight is None:
            return
        try:
            self._runner.fetch(flight.handle)
        except Exception as exc:
            _log.warning("the step behind a failed one failed, too: %s: %s", type(exc).__name__, exc)
