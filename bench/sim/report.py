"""The comparison as a table and as JSON. Called by ``python -m bench.sim``; touches no file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from bench.sim.comparison import DecisionTimes, FleetRun
from bench.sim.traces import TRACES, Figures

MARKS = re.compile(r"(<!-- policies, printed by `make bench-sim` -->\n).*?(<!-- end -->)", re.DOTALL)

_HEAD = (
    "| policy | hit rate | mean wait | p99 wait | loaded | loads | evictions | rejected | expired |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


class PageError(Exception):
    """The page has no place for the table."""


def table(figures: Sequence[Figures]) -> str:
    """Markdown: one section for each trace, one row for each policy."""
    parts = []
    for trace in TRACES:
        rows = [row for row in figures if row.trace == trace.name]
        if rows:
            parts.append(f"**{trace.title[0].upper()}{trace.title[1:]}**\n\n{_HEAD}" + "".join(map(_row, rows)))
    return "\n".join(parts)


def _row(row: Figures) -> str:
    return (
        f"| {row.policy} | {row.hit_rate:.1%} | {row.wait_mean_s:.2f} s | {row.wait_p99_s:.1f} s "
        f"| {row.loaded_gb:,.0f} GB | {row.num_loads:,} | {row.num_evictions:,} | {row.num_rejected:,} "
        f"| {row.num_expired:,} |\n"
    )


def summary(decisions: DecisionTimes, fleet: FleetRun) -> str:
    """Two sentences on the other measurements."""
    return (
        f"The hub decides in {decisions.decision_p50_s * 1e6:.0f} µs (p50) and {decisions.decision_p99_s * 1e6:.0f} µs "
        f"(p99; {decisions.decision_cpu_p99_s * 1e6:.0f} µs of CPU) at {decisions.num_known_models:,} known models.\n"
        f"{fleet.num_models:,} models on {fleet.num_workers} workers: {fleet.num_requests:,} requests, "
        f"{fleet.num_served:,} served, {fleet.num_loads:,} loads, {fleet.num_evictions:,} evictions, "
        f"{fleet.num_events:,} events in {fleet.wall_s:.1f} s.\n"
    )


def as_json(
    seeds: Sequence[int], figures: Sequence[Figures], decisions: DecisionTimes, fleet: FleetRun, machine: dict[str, Any]
) -> dict[str, Any]:
    """What goes into the results file."""
    return {
        "seeds": list(seeds),
        "machine": machine,
        "policies": [dataclasses.asdict(row) for row in figures],
        **dataclasses.asdict(decisions),
        "fleet": dataclasses.asdict(fleet),
    }


def printed(page: str, figures: Sequence[Figures]) -> str:
    """The page with a fresh table between its marks.

    Raises:
        PageError: there are no marks.
    """
    if MARKS.search(page) is None:
        raise PageError("the page has no place for the policy table; put its two marks back")
    return MARKS.sub(lambda match: f"{match[1]}\n{table(figures)}\n{match[2]}", page)
