"""Where masks are computed: at once on few cores while they take next to nothing, beside the step otherwise."""

from __future__ import annotations

import threading
import time
from typing import Any

from naru_worker.adapters.engine.grammar_masks import FEW_CORES, INLINE_S, MaskThread


class Job:
    """Notes in which thread it ran; takes as long as it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.thread: threading.Thread | None = None
        self.done = threading.Event()

    def run(self, executor: object) -> None:
        assert executor is not None
        self.thread = threading.current_thread()
        until_s = time.perf_counter() + self.seconds
        while time.perf_counter() < until_s:
            pass
        self.done.set()

    def posted(self, masks: MaskThread) -> bool:
        """Whether it was done at once."""
        job: Any = self
        masks.post(job)
        assert self.done.wait(10)
        return self.thread is threading.current_thread()


def test_on_many_cores_masks_are_always_computed_beside_the_step() -> None:
    masks = MaskThread(num_cores=FEW_CORES + 1)
    assert [Job().posted(masks) for _ in range(3)] == [False, False, False]


def test_on_few_cores_slow_masks_alone_are_computed_beside_the_step() -> None:
    masks = MaskThread(num_cores=2)
    assert Job(4 * INLINE_S).posted(masks)
    assert not Job(4 * INLINE_S).posted(masks), "the one before took long"


def test_a_late_job_is_not_overtaken_by_one_that_is_done_at_once() -> None:
    masks = MaskThread(num_cores=2)
    Job(4 * INLINE_S).posted(masks)
    late: Any = Job(0.05)
    masks.post(late)
    follower = Job()
    assert not follower.posted(masks)
    assert late.done.is_set()
