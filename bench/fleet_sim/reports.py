"""What workers tell of their load, and how late others know it. Called by engines (writing) and policies (reading)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's load at an instant."""

    time_s: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    draining_tokens_per_s: float
    """By which the waiting tokens become fewer until the next report."""
    kv_usage: float
    prefill_tokens_per_s: float
    decode_step_s: float
    by_origin: tuple[tuple[tuple[int, str], int], ...]
    """Requests alive there by (router, model)."""

    @property
    def num_alive(self) -> int:
        """Requests there, waiting or running."""
        return self.num_running + self.num_waiting

    def waiting_tokens_at(self, time_s: float) -> float:
        """Prompt tokens still to compute a little after it."""
        return max(0.0, self.num_waiting_tokens - (time_s - self.time_s) * self.draining_tokens_per_s)

    def alive_of_others(self, router: int, model: str = "") -> int:
        """Requests there that other routers sent; of one model, or of all."""
        return sum(count for origin, count in self.by_origin if origin[0] != router and model in {"", origin[1]})


NOTHING = Report(0.0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, ())


class Reports:
    """Mutable: the reports of one worker, the newest last."""

    KEPT = 4096
    """More than come within any delay."""

    def __init__(self) -> None:
        self._reports: list[Report] = [NOTHING]

    def add(self, report: Report) -> None:
        """Adds one; of an instant the last one counts."""
        if self._reports[-1].time_s == report.time_s:
            self._reports[-1] = report
        else:
            self._reports.append(report)
        if len(self._reports) > 2 * self.KEPT:
            del self._reports[: self.KEPT]

    def at(self, time_s: float) -> Report:
        """The newest one that was made by then."""
        for report in reversed(self._reports):
            if report.time_s <= time_s:
                return report
        return self._reports[0]
