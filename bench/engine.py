"""Compares Naru's engine with llama-server and vLLM on this machine: ``make bench`` runs ``python -m bench.engine``.

One engine at a time, the same requests to each, one client. Prints a table of ratios and writes the figures as JSON.
How to read them stands in README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bench import engines, machine, measure, report
from bench.export_hf import ExportError
from bench.peers import PeerError
from bench.servers import Server, ServerError, ServerSpec
from bench.worker import WorkerError, WorkerFigures, measure_worker
from bench.workload import CASE_NAMES, CaseName, single_token_words

_FOLDER = Path(__file__).resolve().parent
RESULTS_PATH = _FOLDER / "results" / "engine.json"
PARTIAL_RESULTS_PATH = _FOLDER / ".cache" / "engine.json"
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
class Plan:
    """What this run does."""

    model_path: Path
    names: tuple[str, ...]
    cases: tuple[CaseName, ...]
    repeats: int
    num_starts: int
    num_settings: int
    """Settings of each engine to try, at most."""
    seed: int
    keep_logs: Path
    output: Path


def run_engine(specs: Sequence[ServerSpec], plan: Plan, words: Sequence[str]) -> EngineRun:
    """One engine in each of its settings, and of each case the better figures."""
    runs = [run_setting(spec, index, plan, words) for index, spec in enumerate(specs[: plan.num_settings])]
    figures, chosen = report.best_of([run.figures for run in runs])
    return EngineRun(
        figures=figures,
        best_settings={case: runs[index].settings for case, index in chosen.items()},
        failure="; ".join(run.failure for run in runs if run.failure),
        runs=runs,
    )


def run_setting(spec: ServerSpec, index: int, plan: Plan, words: Sequence[str]) -> SettingRun:
    """Starts one server, runs the cases, stops it. A failure ends this setting's part; earlier figures are kept."""
    run = SettingRun(settings=spec.settings, version=spec.version)
    try:
        _say(f"{spec.name}: starting ({spec.settings})")
        with Server(spec, plan.keep_logs / f"{spec.name}-{index}.log") as server:
            measure.wait_until_serving(server, SERVING_TIMEOUT_S)
            run.start_s = server.start_s
            for case in plan.cases:
                measurements = measure.run_case(server, case, words, plan.seed, plan.repeats, _say)
                run.figures[case] = report.figures(measurements)
                run.raw += [measure.to_json(measurement) for measurement in measurements]
            run.processes = machine.usage_by_process(server.pid)
            run.rss_mb = sum(process.rss_mb for process in run.processes)
    except (ServerError, measure.MeasureError) as exc:
        run.failure = str(exc)
        _say(f"{spec.name}: {exc}")
    return run


def run_all(plan: Plan) -> dict[str, Any]:
    """The whole run, as the content of the results file."""
    here = machine.describe()
    words = single_token_words(engines.vocabulary(plan.model_path))
    runs: dict[str, EngineRun] = {}
    worker: WorkerFigures | None = None
    worker_failure = ""
    with tempfile.TemporaryDirectory(prefix="naru-bench-") as work_folder:
        setup = engines.Setup(plan.model_path, here.num_cores, Path(work_folder), plan.keep_logs)
        for name in plan.names:
            try:
                runs[name] = run_engine(engines.SPECS[name](setup), plan, words)
            except (PeerError, ExportError) as exc:
                runs[name] = EngineRun(failure=str(exc))
                _say(f"{name}: {exc}")
        if "naru" in plan.names:
            _say("naru: a worker alone: start, memory, KV waste")
            try:
                worker = measure_worker(plan.model_path, words, plan.num_starts, plan.keep_logs / "worker.log")
            except WorkerError as exc:
                worker_failure = str(exc)
                _say(f"naru: {exc}")
    return _results(plan, here, runs, worker, worker_failure)


def _results(
    plan: Plan, here: machine.Machine, runs: dict[str, EngineRun], worker: WorkerFigures | None, worker_failure: str
) -> dict[str, Any]:
    by_engine = {name: run.figures for name, run in runs.items()}
    results: dict[str, Any] = {
        "isa": here.isa,
        "cpu_model": here.cpu_model,
        **report.ratios(by_engine, engines.PEERS),
        "kv_waste": worker and worker.kv_waste,
        "start_to_first_token_s": worker and worker.start_to_first_token_s,
        "memory_overhead_mb": worker and worker.memory_overhead_mb,
        "machine": dataclasses.asdict(here),
        "model": plan.model_path.name,
        "cases": list(plan.cases),
        "repeats": plan.repeats,
        "seed": plan.seed,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "warnings": report.warnings(by_engine, here.load_average),
        "naru_worker": dataclasses.asdict(worker) if worker else {"failure": worker_failure or "not measured"},
        "engines": {name: dataclasses.asdict(run) for name, run in runs.items()},
    }
    rounded: dict[str, Any] = report.rounded(results)
    return rounded


def print_results(results: dict[str, Any], output: Path) -> None:
    """The table, the worker's figures and what to know about them, on standard output."""
    by_engine = {name: run["figures"] for name, run in results["engines"].items()}
    print(f"\n{results['cpu_model']}, {results['isa']}, {results['machine']['num_cores']} cores; {results['model']}\n")
    print(report.table(by_engine, engines.PEERS, results))
    worker = results["naru_worker"]
    if "kv_waste" in worker:
        print(
            f"\nnaru's worker: start to first token {worker['start_to_first_token_s']:.2f} s, "
            f"KV waste {worker['kv_waste']:.1%}, memory beside weights and KV {worker['memory_overhead_mb']:.0f} MB"
        )
    failures = [f"{name}: {run['failure']}" for name, run in results["engines"].items() if run["failure"]]
    for line in [*results["warnings"], *failures]:
        print(f"note: {line}")
    print(f"\nwritten to {output}")


def _plan(argv: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one repeat, one setting: to see that it runs")
    parser.add_argument("--only", default="", help=f"comma-separated engines of {', '.join(engines.SPECS)}")
    parser.add_argument("--cases", default="", help=f"comma-separated cases of {', '.join(CASE_NAMES)}")
    parser.add_argument("--repeats", type=int, default=0, help="measured rounds of each case (5)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (1)")
    parser.add_argument("--model", default=None, help=f"a GGUF file ({engines.DEFAULT_MODEL_URI})")
    parser.add_argument("--output", type=Path, default=None, help="results file")
    parser.add_argument("--logs", type=Path, default=_FOLDER / ".cache" / "logs", help="folder for the servers' logs")
    arguments = parser.parse_args(argv)
    names = _chosen(parser, "--only", arguments.only, tuple(engines.SPECS))
    cases = _chosen(parser, "--cases", arguments.cases, CASE_NAMES)
    if arguments.repeats < 0:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    partial = bool(arguments.quick or arguments.only or arguments.cases)
    return Plan(
        model_path=engines.find_model(arguments.model),
        names=names,
        cases=tuple(case for case in CASE_NAMES if case in cases),
        repeats=arguments.repeats or (1 if arguments.quick else 5),
        num_starts=2 if arguments.quick else 5,
        num_settings=1 if arguments.quick else 9,
        seed=arguments.seed,
        keep_logs=arguments.logs,
        output=arguments.output or (PARTIAL_RESULTS_PATH if partial else RESULTS_PATH),
    )


def _chosen(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The named ones in the order of `known`; all for an empty text."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for name in wanted:
        if name not in known:
            parser.error(f"{flag}: {name!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if not wanted or name in wanted)


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _leave(signum: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that `with` blocks stop the servers."""
    raise SystemExit(128 + signum)


def main(argv: Sequence[str]) -> int:
    """The command. 0 when every engine that was asked for was measured, 1 when one was not, 130 when interrupted."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        plan = _plan(argv)
        plan.keep_logs.mkdir(parents=True, exist_ok=True)
        results = run_all(plan)
    except PeerError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; nothing was written", file=sys.stderr)
        return 130
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    plan.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print_results(results, plan.output)
    return int(any(run["failure"] for run in results["engines"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
