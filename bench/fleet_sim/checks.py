"""What the comparison must show of Naru, and where another policy is better. Pure; called by the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.fleet_sim.comparison import Figures

NAMES = ("oracle", "Naru", "round robin")
MAX_DISTANCE = 0.03
MIN_SPEEDUP = 1.5
SPEEDUP_TRACES = ("chats", "shared")
CLOSE = 0.02
"""Means closer than that count as equal."""

Key = tuple[str, int, str, float]
"""Machine, number of routers, trace, load."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold on one trace."""

    machine: str
    num_routers: int
    trace: str
    load: float
    what: str
    value: float
    limit: float
    holds: bool


def groups(rows: Sequence[Figures]) -> dict[Key, list[Figures]]:
    """Rows by machine, routers, trace and load, in their order."""
    found: dict[Key, list[Figures]] = {}
    for row in rows:
        found.setdefault((row.machine, row.num_routers, row.trace, row.load), []).append(row)
    return found


def checks(rows: Sequence[Figures]) -> list[Check]:
    """All of them; groups without the policies they need have none."""
    return [check for key, group in groups(rows).items() for check in _checks(key, group)]


def _checks(key: Key, group: Sequence[Figures]) -> Iterator[Check]:
    by_name = {row.policy: row for row in group}
    if any(name not in by_name for name in NAMES):
        return
    oracle, naru, turns = (by_name[name] for name in NAMES)
    distance = oracle.hit_ratio - naru.hit_ratio
    yield Check(*key, "points of hit ratio below the oracle", distance, MAX_DISTANCE, distance <= MAX_DISTANCE)
    if key[2] in SPEEDUP_TRACES:
        speedup = turns.ttft_mean_s / naru.ttft_mean_s
        yield Check(*key, "times lower mean TTFT than round robin", speedup, MIN_SPEEDUP, speedup >= MIN_SPEEDUP)


def better_than_naru(group: Sequence[Figures]) -> list[tuple[str, float]]:
    """Policies with a clearly lower mean TTFT, the oracle aside, and by which share of Naru's it is lower."""
    naru = next((row for row in group if row.policy == "Naru"), None)
    if naru is None:
        return []
    others = (row for row in group if row.policy not in {"oracle", "Naru"})
    shares = [(row.policy, 1.0 - row.ttft_mean_s / naru.ttft_mean_s) for row in others]
    return sorted((each for each in shares if each[1] > CLOSE), key=lambda each: -each[1])
