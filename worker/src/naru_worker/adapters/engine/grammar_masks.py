"""Token masks, computed in a thread beside the forward pass.

The engine posts a job when it builds a step, and the step's sampling waits for the job's gate. A job that fails opens
its gate all the same: it costs its own requests, and no step waits for ever.

Where the forward pass has all of the few cores there are, a thread beside it delays every one of its parts: there masks
are computed before it, by as many threads, for as long as they take next to nothing. On two cores that halves what a
schema costs.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor

from naru_worker.adapters.engine.grammar_matcher import GrammarMatcher
from naru_worker.adapters.ops.protocol import TokenMasks
from naru_worker.core.step import Row, RowResult, StepPlan

_log = logging.getLogger(__name__)

MASK_WAIT_S = 2.0
"""A step waits so long for all its masks together. Limits end each of them within ten milliseconds, most in a tenth of
one; the rest is for a machine that has no core to spare."""
FEW_CORES = 4
INLINE_S = 0.0005
"""Masks of one step that took longer are computed beside the next one."""
GIVEN_UP = -1
"""The token of a row whose mask was waited for in vain."""
LATE = "its grammar takes too long for a single token; make it simpler"


@dataclass(slots=True, eq=False)
class MaskJob:
    """The masks of one step, one for each matcher, in their order."""

    matchers: Items[GrammarMatcher]
    masks: TokenMasks
    failure: str = ""
    """Why none of the masks can be used."""
    has_failed: bool = False
    """Some mask cannot be used."""

    def run(self, executor: LLExecutor) -> None:
        """Writes the masks and opens the gate."""
        words = self.masks.words
        pairs = [(matcher.native, place) for place, matcher in enumerate(self.matchers)]
        try:
            executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, words.shape[0])
            for matcher in self.matchers:
                matcher.look()
            self.has_failed = any([matcher.failure for matcher in self.matchers])
        except BaseException as exc:
            # The top of a job: a panic of the library is no Exception, and must cost these requests only.
            _log.error("masks could not be computed", exc_info=exc)
            self.failure, self.has_failed = f"its grammar could not be followed ({type(exc).__name__})", True
        finally:
            # Seen by native code that polls it: the masks were written before, by threads that have been joined.
            self.masks.gate[0] = 1

    @property
    def is_done(self) -> bool:
        """Whether the masks are written; else a thread may still be at work on them and on the matchers."""
        return bool(self.masks.gate[0] > 0)


@dataclass(slots=True, eq=False)
class MaskThread:
    """One thread for all models of a process; begins with the first job, and sleeps between them."""

    num_cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    _jobs: queue.SimpleQueue[MaskJob] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _executor: LLExecutor | None = None
    """Of the engine thread."""
    _is_quick: bool = True
    """The last job was."""

    def post(self, job: MaskJob) -> None:
        """Has a job done, at once or beside what follows. Engine thread only."""
        if self._is_quick and self.num_cores <= FEW_CORES:
            if self._executor is None:
                self._executor = LLExecutor(num_threads=self.num_cores)
            self._time(job, self._executor)
            return
        self._is_quick = False  # until the thread says so: it may be late
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        # On few cores the forward pass needs them all; on many, some are to spare.
        executor = LLExecutor(num_threads=max(1, min(4, self.num_cores // 4)))
        while True:
            self._time(self._jobs.get(), executor)

    def _time(self, job: MaskJob, executor: LLExecutor) -> None:
        started_s = time.perf_counter()
        job.run(executor)
        self._is_quick = time.perf_counter() - started_s < INLINE_S


def begin_masks(thread: MaskThread, matchers: Items[GrammarMatcher], masks: TokenMasks) -> MaskJob:
    """Has the masks of a step's rows computed; those of the step before must be there."""
    masks.gate[0] = 0
    job = MaskJob(matchers, masks)
    thread.post(job)
    return job


def end_masks(job: MaskJob, plan: StepPlan, results: list[RowResult], *, is_done: bool) -> list[RowResult]:
    """The results of a step that was run, without tokens for sequences whose matcher has failed.

    `is_done`: as read after the step; it may become so at any time.
    """
    failure = job.failure if is_done else LATE
    if failure:
        # A matcher that is still at work is not to be asked anything.
        for matcher in job.matchers:
            matcher.failure = failure
    elif not job.has_failed and not any([result.token_id == GIVEN_UP for result in results]):
        return results
    return [_checked(row, result) for row, result in zip(plan.rows, results, strict=True)]


def _checked(row: Row, result: RowResult) -> RowResult:
    matcher = row.sequence.matcher
    if not isinstance(matcher, GrammarMatcher) or not row.samples:
        return result
    if result.token_id == GIVEN_UP and not matcher.failure:
        matcher.failure = LATE  # its mask came when nobody waited for it any more
    return RowResult(None) if matcher.failure else result


def make_masks(rows: Items[GrammarMatcher | None]) -> TokenMasks:
    """Room for the masks of the rows that have a matcher; closed."""
    places = np.full(len(rows), -1, np.int32)
    held = [row for row, matcher in enumerate(rows) if matcher is not None]
    places[held] = np.arange(len(held), dtype=np.int32)
    num_words = max(matcher.mask_words for matcher in rows if matcher is not None)
    return TokenMasks(places, np.zeros((len(held), num_words), np.uint32), np.zeros(1, np.int32), MASK_WAIT_S)
