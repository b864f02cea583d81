"""One engine of the comparison: starts its servers one after another, runs the cases, keeps what each setting gave.

Called by `engine`, which decides what is run; `measure` sends the requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine, measure, report
from bench.progress import Progress
from bench.servers import Server, ServerError, ServerSpec
from bench.workload import CaseName, Scale

SERVING_TIMEOUT_S = 120.0


@dataclass
class SettingRun:
    """What one engine gave in one setting."""

    settings: str = ""
    version: str = ""
    start_s: float | None = None
    rss_mb: float | None = None
    """Of its whole process tree, after the last case."""
    processes: list[machine.ProcessUsage] = field(default_factory=list)
    """The same by process, CPU time since the start."""
    figures: dict[str, report.Figures] = field(default_factory=dict)
    raw: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    """Why figures are missing; empty when none are."""


@dataclass
class EngineRun:
    """What one engine gave, each case in the setting that suited it."""

    figures: dict[str, report.Figures] = field(default_factory=dict)
    best_settings: dict[str, str] = field(default_factory=dict)
    """By case."""
    failure: str = ""
    """Why there are no figures of some case, or none of some setting; empty when all are there."""
    runs: list[SettingRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Suite:
    """The cases with one model."""

    name: str
    model_path: Path
    scale: Scale
    repeats: measure.Repeats
    cases: tuple[CaseName, ...]
    warmed: tuple[CaseName, ...]
    """Cases with an unmeasured round before."""


@dataclass(frozen=True, slots=True)
class Room:
    """What all engines of a run share."""

    words: Sequence[str]
    seed: int
    log_folder: Path
    progress: Progress


def cases_for(spec: ServerSpec, cases: Sequence[CaseName], chosen: Mapping[str, str]) -> tuple[CaseName, ...]:
    """The cases to run with this spec: those it is for, but for cases that `chosen` gives to another setting."""
    return tuple(
        case
        for case in cases
        if (not spec.cases or case in spec.cases) and chosen.get(case, spec.settings) == spec.settings
    )


def still_known(chosen: Mapping[str, str], specs: Sequence[ServerSpec]) -> dict[str, str]:
    """What an earlier run chose, without settings that the engine has no more: their cases are tried in all."""
    known = {spec.settings for spec in specs}
    return {case: settings for case, settings in chosen.items() if settings in known}


def step_key(suite: str, engine: str, settings: str, what: str) -> str:
    """The name of a step for `Progress`."""
    return f"{suite}/{engine}/{settings}/{what}"


def steps_of(specs: Sequence[ServerSpec], suite: Suite, chosen: Mapping[str, str]) -> list[str]:
    """All steps of `run_engine` with the same arguments."""
    chosen = still_known(chosen, specs)
    planned = [(spec, cases_for(spec, suite.cases, chosen)) for spec in specs]
    return [
        step_key(suite.name, spec.name, spec.settings, what)
        for spec, cases in planned
        if cases
        for what in ("start", *cases)
    ]


def run_engine(specs: Sequence[ServerSpec], suite: Suite, chosen: Mapping[str, str], room: Room) -> EngineRun:
    """One engine in its settings, of each case the better figures. `chosen`: the only setting to try, by case."""
    chosen = still_known(chosen, specs)
    runs = []
    for index, spec in enumerate(specs):
        cases = cases_for(spec, suite.cases, chosen)
        if cases:
            runs.append(run_setting(spec, f"{suite.name}-{spec.name}-{index}", cases, suite, room))
    figures, best = report.best_of([run.figures for run in runs])
    return EngineRun(
        figures=figures,
        best_settings={case: runs[index].settings for case, index in best.items()},
        failure="; ".join(run.failure for run in runs if run.failure),
        runs=runs,
    )


def run_setting(spec: ServerSpec, name: str, cases: Sequence[CaseName], suite: Suite, room: Room) -> SettingRun:
    """Starts one server, runs the cases, stops it. A failure ends this setting's part; earlier figures are kept."""
    run = SettingRun(settings=spec.settings, version=spec.version)
    progress = room.progress
    try:
        progress.begin(step_key(suite.name, spec.name, spec.settings, "start"))
        progress.tell(f"{suite.name}, {spec.name}: starting ({spec.settings})")
        with Server(spec, room.log_folder / f"{name}.log") as server:
            measure.wait_until_serving(server, SERVING_TIMEOUT_S)
            server.check_library()
            run.start_s = server.start_s
            for case in cases:
                progress.begin(step_key(suite.name, spec.name, spec.settings, case))
                measurements = measure.run_case(
                    server,
                    case,
                    room.words,
                    room.seed,
                    suite.scale,
                    suite.repeats,
                    progress.tell,
                    warms=case in suite.warmed,
                )
                run.figures[case] = report.figures(measurements)
                run.raw += [measure.to_json(measurement) for measurement in measurements]
            run.processes = machine.usage_by_process(server.pid)
            run.rss_mb = sum(process.rss_mb for process in run.processes)
    except (ServerError, measure.MeasureError) as exc:
        run.failure = str(exc)
        progress.tell(f"{spec.name}: {exc}")
    progress.end()
    return run


def say(text: str) -> None:
    """One line of progress with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
