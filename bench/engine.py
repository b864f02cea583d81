"""Compares Naru's engine with llama-server and vLLM on this machine: ``make bench`` runs ``python -m bench.engine``.

One engine at a time, the same requests to each, one client. Prints a table of ratios and writes the figures as JSON.
How to read them stands in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from bench import accuracy_store, engines, fractions, limits, machine, measure, winners
from bench.engine_results import RUNS_FOLDER, collected, print_results, without_requests
from bench.engine_run import EngineRun, Room, Suite, run_engine, say, steps_of
from bench.export_hf import ExportError
from bench.gguf_models import LARGER, write_random
from bench.peers import PeerError, peers_folder
from bench.progress import Progress
from bench.servers import ServerSpec
from bench.worker import WorkerError, WorkerFigures, measure_worker
from bench.workload import CASE_NAMES, FULL, LONG_CASES, REDUCED, WARMED, CaseName, single_token_words

from naru_worker.native.isa import VARIANTS, detect_isa, runnable

_FOLDER = Path(__file__).resolve().parent
RESULTS_FOLDER = _FOLDER / "results"
CACHE_FOLDER = _FOLDER / ".cache"
Name = TypeVar("Name", bound=str)
_MODELS = ("small", "larger")
_EXTRAS = "naru/worker", "accuracy", "limits"


@dataclass(frozen=True, slots=True)
class Plan:
    """What this run does."""

    suites: tuple[Suite, ...]
    names: tuple[str, ...]
    num_starts: int
    is_quick: bool
    """The first setting of each engine only."""
    known: winners.Known
    """What earlier runs found out; this one adds to it."""
    known_key: str
    reuses_settings: bool
    """Peers only in the settings that did best then."""
    has_extras: bool
    """Whether the worker alone and accuracy are measured, too."""
    seed: int
    isa: str
    """All engines keep to it; empty: none is restricted."""
    keep_logs: Path
    output: Path
    is_whole: bool
    """Nothing is left out: the results are kept among the runs."""

    @property
    def used_isa(self) -> str:
        """The engine's own variant in this run."""
        return self.isa or detect_isa()


def results_path(isa: str) -> Path:
    """Of the newest whole run; with engines restricted to `isa` where it is given."""
    return RESULTS_FOLDER / (f"engine-{isa}.json" if isa else "engine.json")


def run_all(plan: Plan) -> dict[str, Any]:
    """The whole run, as the content of the results file."""
    here = machine.describe()
    extras = _EXTRAS if plan.has_extras else ("limits",)
    progress = Progress(extras, plan.known.took_s, time.monotonic, say)
    words = single_token_words(engines.vocabulary(plan.suites[0].model_path))
    room = Room(words, plan.seed, plan.keep_logs, progress)
    facts = {suite.name: fractions.facts_of(suite.model_path) for suite in plan.suites}
    with tempfile.TemporaryDirectory(prefix="naru-bench-") as work_folder:
        servers = [_servers(plan, suite, here.num_cores, Path(work_folder)) for suite in plan.suites]
        for one in servers:
            for name, specs in one.specs.items():
                progress.steps = [*progress.steps, *steps_of(specs, one.suite, _chosen_settings(plan, one, name))]
        found = _limits(plan, {name: one.weight_bytes for name, one in facts.items()}, here.num_cores, progress)
        by_suite = {one.suite.name: _run_suite(plan, one, room) for one in servers}
    worker, accuracy = _run_extras(plan, room) if plan.has_extras else (None, None)
    progress.end()
    if not plan.is_quick:
        plan.known.took_s.update(progress.took_s)
        winners.save(peers_folder(), plan.known_key, plan.known)
    return collected(
        plan,
        here,
        by_suite,
        facts,
        found,
        worker if isinstance(worker, WorkerFigures) else None,
        {"failure": "not measured"} if worker is None else {"failure": worker} if isinstance(worker, str) else {},
        accuracy,
        progress.took_s,
    )


def _limits(plan: Plan, sizes: Mapping[str, int], num_cores: int, progress: Progress) -> limits.Limits:
    """Measured at the sizes of the weights and beyond the caches; nothing where Naru is not measured."""
    if "naru" not in plan.names:
        return limits.Limits(num_cores)
    progress.begin("limits")
    progress.tell("the machine's limits")
    budget_s = 0.05 if plan.is_quick else limits.BUDGET_S
    return limits.measure(plan.used_isa, {**sizes, "DRAM": limits.DRAM_BYTES}, num_cores, budget_s)


@dataclass(frozen=True, slots=True)
class _Servers:
    """What can be started for one suite."""

    suite: Suite
    specs: Mapping[str, tuple[ServerSpec, ...]]
    """By engine."""
    failures: Mapping[str, str]
    """Why an engine cannot be started at all."""
    is_first: bool


def _servers(plan: Plan, suite: Suite, num_cores: int, work_folder: Path) -> _Servers:
    specs: dict[str, tuple[ServerSpec, ...]] = {}
    failures: dict[str, str] = {}
    logs, folder = plan.keep_logs / suite.name, work_folder / suite.name
    logs.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    setup = engines.Setup(suite.model_path, num_cores, folder, logs, plan.isa)
    for name in plan.names:
        try:
            specs[name] = engines.SPECS[name](setup)
        except (PeerError, ExportError) as exc:
            failures[name] = str(exc)
            say(f"{name}: {exc}")
            continue
        if plan.is_quick:
            specs[name] = tuple({spec.cases: spec for spec in reversed(specs[name])}.values())
    return _Servers(suite, specs, failures, suite is plan.suites[0])


def _run_suite(plan: Plan, servers: _Servers, room: Room) -> dict[str, EngineRun]:
    """All engines with one model. What a run in all settings finds out is known from then on."""
    runs: dict[str, EngineRun] = {}
    for name in plan.names:
        if name in servers.failures:
            runs[name] = EngineRun(failure=servers.failures[name])
            continue
        specs = servers.specs[name]
        chosen = _chosen_settings(plan, servers, name)
        runs[name] = run_engine(specs, servers.suite, chosen, room)
        if servers.is_first and len(specs) > 1 and not chosen and not plan.is_quick:
            tried = runs[name].runs
            use = winners.fewest([one.figures for one in tried])
            plan.known.learn(name, specs[0].version, {case: tried[index].settings for case, index in use.items()})
    return runs


def _chosen_settings(plan: Plan, servers: _Servers, engine: str) -> Mapping[str, str]:
    """By case: the only setting to try; empty: all. Models after the first use what the first one found out."""
    if servers.is_first and not plan.reuses_settings:
        return {}
    return plan.known.settings(engine, servers.specs[engine][0].version)


def _run_extras(plan: Plan, room: Room) -> tuple[WorkerFigures | str | None, dict[str, Any] | None]:
    """The worker alone (or why not), and accuracy."""
    worker: WorkerFigures | str | None = None
    if "naru" in plan.names:
        room.progress.begin("naru/worker")
        room.progress.tell("naru: a worker alone: start, memory, KV waste")
        try:
            log = plan.keep_logs / "worker.log"
            worker = measure_worker(plan.suites[0].model_path, room.words, plan.num_starts, log, plan.isa)
        except WorkerError as exc:
            worker = str(exc)
            say(f"naru: {exc}")
    room.progress.begin("accuracy")
    room.progress.tell("accuracy against float32")
    argv = ["--weights", "q4_1", "--kv", "served", "--windows", "2"]
    argv += ["--llama-isa", plan.isa] if plan.isa else []
    argv += [] if "llamacpp" in plan.names else ["--no-llama"]
    return worker, accuracy_store.measured(plan.used_isa, argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="one round, one setting: to see that it runs")
    parser.add_argument("--only", default="", help=f"comma-separated engines of {', '.join(engines.SPECS)}")
    parser.add_argument("--cases", default="", help=f"comma-separated cases of {', '.join(CASE_NAMES)}")
    parser.add_argument("--models", default="", help="small, larger (both)")
    parser.add_argument("--repeats", type=int, default=0, help="most rounds of each case (5; 2 with the larger model)")
    parser.add_argument(
        "--settings",
        choices=("auto", "best", "all"),
        default="auto",
        help="peers in all settings, or in those that did best in an earlier run here (auto: if there was one)",
    )
    parser.add_argument("--isa", choices=[name for name in VARIANTS if name != "plain"], help="all engines keep to it")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (1)")
    parser.add_argument("--model", default=None, help=f"a GGUF file ({engines.DEFAULT_MODEL_URI})")
    parser.add_argument("--output", type=Path, default=None, help="results file")
    parser.add_argument("--logs", type=Path, default=CACHE_FOLDER / "logs", help="folder for the servers' logs")
    return parser


def _plan(argv: Sequence[str]) -> Plan:
    parser = _parser()
    given = parser.parse_args(argv)
    names = _chosen(parser, "--only", given.only, tuple(engines.SPECS))
    cases = _chosen(parser, "--cases", given.cases, CASE_NAMES)
    models = _chosen(parser, "--models", given.models, _MODELS)
    if given.repeats < 0:
        parser.error(f"--repeats is {given.repeats}; it must be at least 1")
    isa = given.isa or ""
    if isa and not runnable(isa):
        parser.error(f"--isa is {isa!r}, but this machine cannot run it")
    is_whole = not (given.quick or given.only or given.cases) and "small" in models
    model = engines.find_model(given.model)
    here = machine.describe()
    known_key = winners.key_of(here.cpu_model, here.num_cores, isa, model.name)
    known = winners.load(peers_folder(), known_key)
    if given.settings == "best" and not known.engines:
        parser.error("--settings is best, but no run on this machine has tried them all: run once without it")
    repeats = given.repeats or (1 if given.quick else 0)
    return Plan(
        suites=_suites(model, models, cases, bool(given.cases), repeats),
        names=names,
        num_starts=2 if given.quick else 5,
        is_quick=given.quick,
        known=known,
        known_key=known_key,
        reuses_settings=given.settings != "all",
        has_extras=not given.only and not given.cases,
        seed=given.seed,
        isa=isa,
        keep_logs=given.logs,
        output=given.output or (results_path(isa) if is_whole else CACHE_FOLDER / "engine.json"),
        is_whole=is_whole,
    )


def _suites(
    model: Path, models: Sequence[str], cases: tuple[CaseName, ...], are_given: bool, repeats: int
) -> tuple[Suite, ...]:
    """The default model, and the larger one, which is written when it is not there yet.

    The larger one has no long cases but where they are asked for: llama.cpp takes minutes for such a prompt.
    """
    suites = []
    if "small" in models:
        suites.append(Suite("small", model, FULL, measure.Repeats(repeats or 5, 8.0), cases, WARMED))
    if "larger" in models:
        target = peers_folder() / "models" / f"{LARGER.name}.gguf"
        if not target.is_file():
            say(f"writing {target}")
        write_random(LARGER, model, target)
        some = cases if are_given else tuple(case for case in cases if case not in LONG_CASES)
        suites.append(Suite("larger", target, REDUCED, measure.Repeats(repeats or 2, 5.0), some, ("single",)))
    return tuple(suites)


def _chosen(parser: argparse.ArgumentParser, flag: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """The named ones in the order of `known`; all for an empty text."""
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    for name in wanted:
        if name not in known:
            parser.error(f"{flag}: {name!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if not wanted or name in wanted)


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
    _write(plan.output, results)
    if plan.is_whole:
        stamp = results["measured_at"].replace(":", "").replace("-", "")
        _write(RUNS_FOLDER / f"engine-{plan.used_isa}-{stamp}.json", without_requests(results))
    print_results(results, plan.output)
    failures = [
        run["failure"] for part in (results, results.get("larger", {})) for run in part.get("engines", {}).values()
    ]
    return int(any(failures))


def _write(path: Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
