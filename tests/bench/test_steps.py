from __future__ import annotations

import pytest

pytest.importorskip("gguf")

from bench import steps


class Part:
    """Something with a method that takes a known time, by a clock that only it moves."""

    def __init__(self, clock: list[int], takes_ns: int, inner: Part | None = None) -> None:
        self.clock = clock
        self.takes_ns = takes_ns
        self.inner = inner
        self.name = "kept"

    def work(self, value: int) -> int:
        """Spends its time, then its inner part's."""
        self.clock[0] += self.takes_ns
        return value if self.inner is None else self.inner.work(value)


def test_the_native_call_is_counted_once_and_apart_from_what_surrounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr("bench.steps.time.perf_counter_ns", lambda: clock[0])
    clocks = steps.Clocks()
    runner = Part(clock, 3, inner=Part(clock, 40))
    runner.inner = steps.Clocked(runner.inner, clocks, {"work": steps.NATIVE})  # type: ignore[assignment]
    timed = steps.Clocked(runner, clocks, {"work": steps.RUN})
    assert timed.work(7) == 7
    assert timed.name == "kept"
    step = clocks.end_step()
    assert (step[steps.NATIVE], step[steps.RUN]) == (40, 3)
    assert set(clocks.end_step().values()) == {0}
