"""Times what a GPU does, by its own clock: events around each run, the cache emptied before it. Called by `gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from bench.stats import median, percentile

WARM_UPS = 3
MIN_RUNS, MAX_RUNS = 5, 200
_FLUSH_BYTES = 256 << 20
# Several times the L2 cache of any GPU here.
_HOLD_CYCLES = 5_000_000
# More than two milliseconds: Triton takes some 30 us of the CPU a launch, and there are up to ten in a run.


class Clock(Protocol):
    """What timing needs of a GPU."""

    def hold(self) -> None:
        """Keeps the GPU busy while more is enqueued: it must never wait between two marks for the CPU."""

    def flush(self) -> None:
        """Leaves nothing of earlier runs in the cache; enqueued, not waited for."""

    def mark(self) -> Any:
        """A moment in the GPU's queue."""

    def wait(self) -> None:
        """Until all that was enqueued is done."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Seconds between two marks that were waited for."""


class CudaClock:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
        self._device = device

    def hold(self) -> None:
        """Lets it count."""
        torch.cuda._sleep(_HOLD_CYCLES)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Overwrites more than the cache holds."""
        self._scratch.zero_()

    def mark(self) -> Any:
        """An event that was recorded."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self) -> None:
        """For the whole device."""
        torch.cuda.synchronize(self._device)

    def elapsed_s(self, start: Any, end: Any) -> float:
        """The events' difference."""
        return float(start.elapsed_time(end)) * 1e-3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run, over several."""

    median_s: float
    p10_s: float
    p90_s: float
    num_runs: int


def timed(
    run: Callable[[], object], clock: Clock, *, budget_s: float = 0.3, now: Callable[[], float] = time.perf_counter
) -> Timing:
    """Seconds that a run takes on the GPU: some runs to warm up, then as many as the budget allows.

    Args:
        run: Enqueues work; must not wait for it.
        clock: Of the GPU.
        budget_s: Of this machine's time, waiting included; MIN_RUNS are made in any case, and at most MAX_RUNS.
        now: This machine's clock.
    """
    for _ in range(WARM_UPS):
        run()
    clock.wait()
    end, seconds = now() + budget_s, list[float]()
    while len(seconds) < MIN_RUNS or (len(seconds) < MAX_RUNS and now() < end):
        marks = []
        # Small kernels take less than their launches: all of these are in the queue before the first one starts.
        clock.hold()
        for _ in range(MIN_RUNS):
            clock.flush()
            start = clock.mark()
            run()
            marks.append((start, clock.mark()))
        clock.wait()
        seconds += [clock.elapsed_s(*pair) for pair in marks]
    return Timing(median(seconds), percentile(seconds, 10), percentile(seconds, 90), len(seconds))
