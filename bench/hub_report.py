"""From the hub's measurements to the results file and the printed table: what was aimed at and what was reached. Pure.

Called by `hub`. What was not measured is None, and is never counted as reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.stats import ratio

Verdict = Literal["ok", "MISSED", "not measured"]


@dataclass(frozen=True, slots=True)
class Target:
    """One figure and its bound."""

    key: str
    label: str
    bound: float
    is_at_least: bool = False
    """Reached at the bound or above it; else at the bound or below it."""
    scale: float = 1.0
    """What the printed number is multiplied with."""
    unit: str = ""

    def verdict(self, value: float | None) -> Verdict:
        """Whether a measured value is good enough."""
        if value is None:
            return "not measured"
        return "ok" if (value >= self.bound if self.is_at_least else value <= self.bound) else "MISSED"

    def shown(self, value: float | None) -> str:
        """A value for people."""
        if value is None:
            return "-"
        number = value * self.scale
        text = f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3g}"
        return f"{text}{self.unit}"


TARGETS = (
    Target("budget_violations", "memory budget broken, samples", 0),
    Target("failed_requests", "failed requests", 0),
    Target("first_token_p50_s", "first token, image on page cache, p50", 0.150, scale=1000, unit=" ms"),
    Target("host_tier_p50_s", "first token, image in host memory, p50", 0.060, scale=1000, unit=" ms"),
    Target("speedup_vs_process_per_model", "faster than a process per model", 10, is_at_least=True, unit="×"),
    Target("itl_p99_ratio_during_loads", "ITL p99 during loads ÷ without", 2, unit="×"),
    Target("decision_p99_s", "decision of the hub, p99", 0.001, scale=1000, unit=" ms"),
    Target("rss_over_budget_mb", "RSS above the budget", 150, unit=" MB"),
    Target("answer_mismatches", "answers unlike the model's first one", 0),
)
MIN_LATENCY_SAMPLES = 30


def headline(parts: Mapping[str, Mapping[str, Any] | None]) -> dict[str, float | None]:
    """The figures of `TARGETS`, from the parts of the run by name; a part that is None was not measured."""
    latency, processes = parts.get("latency") or {}, parts.get("processes") or {}
    traffic, itl, decisions = (parts.get(name) or {} for name in ("traffic", "itl", "decisions"))
    return {
        "budget_violations": traffic.get("budget_violations"),
        "failed_requests": traffic.get("failed_requests"),
        "first_token_p50_s": latency.get("first_token_p50_s"),
        "host_tier_p50_s": latency.get("host_tier_p50_s"),
        "speedup_vs_process_per_model": ratio(processes.get("first_token_p50_s"), latency.get("first_token_p50_s")),
        "itl_p99_ratio_during_loads": itl.get("itl_p99_ratio_during_loads"),
        "decision_p99_s": decisions.get("decision_p99_s"),
        "rss_over_budget_mb": traffic.get("rss_over_budget_mb"),
        "answer_mismatches": traffic.get("answer_mismatches"),
    }


def missed(figures: Mapping[str, float | None]) -> list[str]:
    """Keys of figures that were measured and are not good enough."""
    return [target.key for target in TARGETS if target.verdict(figures.get(target.key)) == "MISSED"]


def renewed(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a whole run with those parts replaced that were measured again, and when that was."""
    again = [part for part in later["plan"]["parts"] if later.get(part) is not None]
    results = {**earlier, **{part: later[part] for part in again}}
    figures = headline(results)
    times = {**earlier.get("measured_again_at", {}), **dict.fromkeys(again, later["measured_at"])}
    return {**results, **figures, "missed": missed(figures), "measured_again_at": times, "failures": later["failures"]}


def table(figures: Mapping[str, float | None]) -> str:
    """One row for each target."""
    rows = [("", "measured", "target", "")]
    for target in TARGETS:
        value = figures.get(target.key)
        bound = "0" if target.bound == 0 else f"{'≥' if target.is_at_least else '≤'} {target.shown(target.bound)}"
        rows.append((target.label, target.shown(value), bound, target.verdict(value)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}  {row[3]}".rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def notes(parts: Mapping[str, Mapping[str, Any] | None], load_average: float) -> list[str]:
    """What a reader of the figures has to know, in sentences."""
    found = []
    latency, traffic = parts.get("latency"), parts.get("traffic")
    if load_average > 0.5:
        found.append(f"the machine was busy before the run (load average {load_average:.2f}): the figures are noisy")
    if latency and latency["num_samples"] < MIN_LATENCY_SAMPLES:
        found.append(f"first tokens stand on {latency['num_samples']} models; {MIN_LATENCY_SAMPLES} are wanted")
    if traffic:
        found += _traffic_notes(traffic)
    return found


def _traffic_notes(traffic: Mapping[str, Any]) -> list[str]:
    found = []
    same = traffic["models_answered"] - traffic["models_told_apart"]
    if same:
        found.append(f"{same} models answer like another one: a mix-up between those would not be seen")
    children = traffic["memory"]["num_children_peak"]
    if children:
        peak_mb = traffic["memory"]["children_rss_peak_bytes"] / 1e6
        found.append(f"packing ran in up to {children} child processes of {peak_mb:.0f} MB together, beside the budget")
    if traffic["failed_loads"]:
        found.append(f"{traffic['failed_loads']} loads failed and were tried again")
    found += [f"{count} requests failed: {why}" for why, count in traffic["failures"].items()]
    return found


def traffic_lines(traffic: Mapping[str, Any]) -> Sequence[str]:
    """The run of many models in sentences."""
    memory = traffic["memory"]
    return (
        f"{traffic['requests_per_s']:.1f} requests/s in {traffic['wall_s'] / 60:.1f} min; {traffic['loads']} loads, "
        f"{traffic['evictions']} evictions",
        f"found loaded: {traffic['hit_ratio']:.1%} of requests (LRU one at a time: {traffic['hit_ratio_lru']:.1%}, "
        f"knowing the future: {traffic['hit_ratio_best']:.1%})",
        f"RSS peak {traffic['rss_peak_bytes'] / 1e6:.0f} MB, budget {memory['budget_bytes'] / 1e6:.0f} MB, "
        f"booked at most {memory['booked_peak_bytes'] / 1e6:.0f} MB",
    )
