"""How a GPU's work is timed, and what is measured of its limits, on a clock that is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from bench.gpu_limits import measured_limits  # noqa: E402
from bench.gpu_timing import MAX_RUNS, MIN_RUNS, WARM_UPS, timed  # noqa: E402


class Queue:
    """A GPU whose runs take the given seconds, one after the other; keeps what was enqueued."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.log: list[str] = []
        self._seconds, self._time, self._waited = seconds, 0.0, 0.0

    def run(self) -> None:
        self.log.append("run")
        self._time += next(self._seconds)

    def hold(self) -> None:
        self.log.append("hold")
        self._time += 1000.0

    def flush(self) -> None:
        self.log.append("flush")
        self._time += 100.0

    def mark(self) -> Any:
        self.log.append("mark")
        return self._time

    def wait(self) -> None:
        self.log.append("wait")
        self._waited = self._time

    def elapsed_s(self, start: float, end: float) -> float:
        assert end <= self._waited, "marks are read after they were waited for"
        return end - start


def ticking(step_s: float) -> Callable[[], float]:
    time_s = 0.0

    def now() -> float:
        nonlocal time_s
        time_s += step_s
        return time_s

    return now


def test_the_median_of_runs_behind_an_emptied_cache_counts_and_warm_ups_do_not() -> None:
    queue = Queue(iter([50.0] * WARM_UPS + [3.0, 1.0, 2.0, 9.0, 2.5]))
    found = timed(queue.run, queue, budget_s=0.0, now=ticking(1.0))
    assert (found.median_s, found.num_runs) == (2.5, MIN_RUNS)
    assert [found.p10_s, found.p90_s] == pytest.approx([1.4, 6.6])
    assert queue.log == ["run"] * WARM_UPS + ["wait", "hold"] + ["flush", "mark", "run", "mark"] * MIN_RUNS + ["wait"]


@pytest.mark.parametrize(("budget_s", "runs"), [(0.0, MIN_RUNS), (3.0, 3 * MIN_RUNS), (1e9, MAX_RUNS)])
def test_runs_go_on_until_the_budget_is_used_but_there_are_few_and_many_enough(budget_s: float, runs: int) -> None:
    queue = Queue(iter([1.0] * (WARM_UPS + MAX_RUNS)))
    assert timed(queue.run, queue, budget_s=budget_s, now=ticking(1.0)).num_runs == runs


def test_limits_count_a_copy_twice_and_a_product_s_sum_as_an_operation_of_its_own() -> None:
    class Steady:
        """Each run takes a millisecond."""

        def hold(self) -> None: ...

        def flush(self) -> None: ...

        def wait(self) -> None: ...

        def mark(self) -> Any:
            return None

        def elapsed_s(self, start: Any, end: Any) -> float:
            return 1e-3

    limits = measured_limits(torch.device("cpu"), Steady(), torch.float32, copy_bytes=1 << 16, size=32)
    assert limits.bandwidth == pytest.approx(2 * 65_536 / 1e-3)
    assert limits.flops_16 == pytest.approx(2 * 32**3 / 1e-3)
    assert limits.flops_8 == 0.0
