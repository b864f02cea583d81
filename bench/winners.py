"""What earlier runs on this machine found out: the settings of peers that are worth a server, and how long steps took.

Kept beside the installed peers, not in the repository: what is best on one machine is not on another. Called by
`engine`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import EngineFigures, merit

FILE_NAME = "settings.json"
RATE_SLACK = 0.03
"""A setting that is this part behind the best one of a case does as well: two runs differ by more."""
TIME_SLACK = 0.1
"""The same for a p99, which moves more."""


def near_best(case: str, settings: Sequence[EngineFigures]) -> frozenset[int]:
    """Which settings do as well in a case as the best one; empty where none was measured."""
    merits = {index: merit(case, cases[case]) for index, cases in enumerate(settings) if case in cases}
    if not merits:
        return frozenset()
    best = max(merits.values())
    least = best * (1 - RATE_SLACK) if best > 0 else best * (1 + TIME_SLACK)
    return frozenset(index for index, value in merits.items() if value >= least)


def fewest(settings: Sequence[EngineFigures]) -> dict[str, int]:
    """By case the setting to use later, so that few servers must be started and each case has one that does best."""
    names = list(dict.fromkeys(case for cases in settings for case in cases))
    near = {case: near_best(case, settings) for case in names}
    left, started = set(names), list[int]()
    while left:
        counts = [sum(index in near[case] for case in left) for index in range(len(settings))]
        started.append(counts.index(max(counts)))
        left = {case for case in left if started[-1] not in near[case]}
    return {
        case: max((index for index in started if case in settings[index]), key=lambda i: merit(case, settings[i][case]))
        for case in names
    }


@dataclass
class Known:
    """Of one machine, model and instruction set."""

    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By engine: its ``version`` then, and ``cases``: the setting of each."""
    took_s: dict[str, float] = field(default_factory=dict)
    """By step of `Progress`."""

    def settings(self, engine: str, version: str) -> Mapping[str, str]:
        """By case the setting to use; empty for an engine of another version."""
        found = self.engines.get(engine, {})
        cases: Mapping[str, str] = found.get("cases", {}) if found.get("version") == version else {}
        return cases

    def learn(self, engine: str, version: str, settings: Mapping[str, str]) -> None:
        """Takes over what a run with all settings found, for the cases it had."""
        self.engines[engine] = {"version": version, "cases": {**self.settings(engine, version), **settings}}


def key_of(cpu_model: str, num_cores: int, isa: str, model: str) -> str:
    """The name under which a machine's `Known` is kept; `isa` empty where no engine is restricted."""
    return f"{cpu_model}, {num_cores} cores, {isa or 'unrestricted'}, {model}"


def load(folder: Path, key: str) -> Known:
    """From the file in `folder`; nothing is known where there is none, or it cannot be read."""
    found = _read(folder).get(key, {})
    return Known(found.get("engines", {}), found.get("took_s", {})) if isinstance(found, dict) else Known()


def save(folder: Path, key: str, known: Known) -> None:
    """Into the file in `folder`, beside what it says of others.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {**_read(folder), key: {"engines": known.engines, "took_s": known.took_s}}
    partial = folder / f"{FILE_NAME}.partial"
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(folder / FILE_NAME)


def _read(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
