"""The comparison as tables and as JSON. Called by ``python -m bench.fleet_sim``; touches no file."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from bench.fleet_sim.checks import Check, better_than_naru, checks, groups
from bench.fleet_sim.comparison import SCENES, Figures
from bench.fleet_sim.placement.comparison import PlacementFigures
from bench.fleet_sim.traces import TRACES
from bench.sim.report import PageError

ROUTING_MARKS = re.compile(r"(<!-- routing, printed by `make bench-routing` -->\n).*?(<!-- end -->)", re.DOTALL)
PLACEMENT_MARKS = re.compile(r"(<!-- placement, printed by `make bench-routing` -->\n).*?(<!-- end -->)", re.DOTALL)

_HEAD = (
    "| policy | mean TTFT | p99 TTFT | hit ratio | to the oracle | max/mean in flight | requests came |\n"
    "|---|---|---|---|---|---|---|\n"
)
_PLACEMENT_HEAD = (
    "| placement | loads an hour | loaded | p50 wait | p99 wait | not served | memory used |\n"
    "|---|---|---|---|---|---|---|\n"
)


def tables(rows: Sequence[Figures]) -> str:
    """Markdown: one section for each machine, trace and load, one row for each policy."""
    titles = {trace.name: trace.title for trace in TRACES}
    scenes = {scene.machine.name: scene for scene in SCENES}
    parts = []
    for (machine, num_routers, trace, load), group in groups(rows).items():
        title = titles[trace][0].upper() + titles[trace][1:]
        scene = scenes[machine]
        routers = "two routers" if num_routers == 2 else "one router"
        where = f"{scene.num_workers} × {machine.upper()}, {routers}, {load:.0%} of capacity"
        parts.append(f"**{title}** ({where})\n\n{_HEAD}" + "".join(_rows(group)) + _note(group))
    return "\n".join(parts)


def _rows(group: Sequence[Figures]) -> Iterator[str]:
    oracle = next((row for row in group if row.policy == "oracle"), None)
    best_s = min((row.ttft_mean_s for row in group if row.policy != "oracle"), default=0.0)
    for row in group:
        distance = f"{100 * (row.hit_ratio - oracle.hit_ratio):+.1f}" if oracle is not None else "–"
        mean = seconds(row.ttft_mean_s)
        if row.ttft_mean_s == best_s:
            mean = f"**{mean}**"
        yield (
            f"| {row.policy} | {mean} | {seconds(row.ttft_p99_s)} | {row.hit_ratio:.1%} | {distance} "
            f"| {row.imbalance:.2f} | {row.offered_load:.0%} |\n"
        )


def _note(group: Sequence[Figures]) -> str:
    better = better_than_naru(group)
    if not better:
        return ""
    names = ", ".join(f"{name} by {share:.0%}" for name, share in better)
    return f"\nNaru is not the best here: lower mean TTFT has {names}.\n"


def seconds(value_s: float) -> str:
    """In the unit that reads best."""
    return f"{value_s * 1e3:.0f} ms" if value_s < 1.0 else f"{value_s:.1f} s" if value_s < 100 else f"{value_s:.0f} s"


def check_lines(found: Sequence[Check]) -> str:
    """One line for each check."""
    return "".join(
        f"{'holds ' if each.holds else 'MISSED'} {each.machine:4} {each.num_routers} {each.trace:10} {each.load:4.0%}  "
        f"{each.value if each.limit >= 1 else 100 * each.value:6.2f} {each.what} "
        f"(limit {each.limit if each.limit >= 1 else 100 * each.limit:g})\n"
        for each in found
    )


def placement_table(rows: Sequence[PlacementFigures]) -> str:
    """Markdown, one row for each placement."""
    return _PLACEMENT_HEAD + "".join(
        f"| {row.name} | {row.loads_per_hour:,.0f} | {row.loaded_gb:,.0f} GB | {seconds(row.wait_p50_s)} "
        f"| {seconds(row.wait_p99_s)} | {row.num_not_served:,} | {row.used_share:.0%} |\n"
        for row in rows
    )


def as_json(seed: int, rows: Sequence[Figures], placements: Sequence[PlacementFigures]) -> dict[str, Any]:
    """What goes into the results file. Nothing of the machine it ran on: time is virtual."""
    return {
        "seed": seed,
        "scenes": [dataclasses.asdict(scene) for scene in SCENES],
        "routing": [dataclasses.asdict(row) for row in rows],
        "checks": [dataclasses.asdict(check) for check in checks(rows)],
        "placement": [dataclasses.asdict(row) for row in placements],
    }


def _between(text: str, match: re.Match[str]) -> str:
    return f"{match[1]}\n{text}\n{match[2]}"


def printed(page: str, rows: Sequence[Figures], placements: Sequence[PlacementFigures]) -> str:
    """The page with fresh tables between its marks.

    Raises:
        PageError: marks are missing.
    """
    for marks, text in ((ROUTING_MARKS, tables(rows)), (PLACEMENT_MARKS, placement_table(placements))):
        if marks.search(page) is None:
            raise PageError("the page has no place for the routing or the placement table; put the marks back")
        page = marks.sub(functools.partial(_between, text), page)
    return page
