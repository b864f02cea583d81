"""The results of a run: put together from what was measured, and printed. Called by `engine`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import accuracy_table, engines, fractions, limits, machine, report
from bench.engine_run import EngineRun
from bench.worker import WorkerFigures

if TYPE_CHECKING:
    from bench.engine import Plan

RUNS_FOLDER = Path(__file__).resolve().parent / "results" / "runs"
"""One file for each whole run, without single requests: docs/benchmarks.md is made from them."""


def collected(
    plan: Plan,
    here: machine.Machine,
    by_suite: Mapping[str, Mapping[str, EngineRun]],
    facts: Mapping[str, fractions.ModelFacts],
    found: limits.Limits,
    worker: WorkerFigures | None,
    worker_failure: dict[str, str],
    accuracy: dict[str, Any] | None,
    took_s: Mapping[str, float],
) -> dict[str, Any]:
    """The content of the results file. The first suite's part is on top, the others are under their names."""
    first, *others = plan.suites
    parts = {
        suite.name: _part(plan, suite.name, by_suite[suite.name], facts[suite.name], found) for suite in plan.suites
    }
    results: dict[str, Any] = {
        "isa": here.isa,
        "used_isa": plan.used_isa,
        "is_restricted": bool(plan.isa),
        "cpu_model": here.cpu_model,
        **parts[first.name],
        "kv_waste": worker and worker.kv_waste,
        "start_to_first_token_s": worker and worker.start_to_first_token_s,
        "memory_overhead_mb": worker and worker.memory_overhead_mb,
        "machine": dataclasses.asdict(here),
        "limits": dataclasses.asdict(found),
        "accuracy": accuracy,
        "seed": plan.seed,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "took_s": dict(took_s),
        "warnings": _warnings(by_suite, here),
        "naru_worker": dataclasses.asdict(worker) if worker else worker_failure,
        **{suite.name: parts[suite.name] for suite in others},
    }
    rounded: dict[str, Any] = report.rounded(results)
    return rounded


def _part(
    plan: Plan, name: str, runs: Mapping[str, EngineRun], facts: fractions.ModelFacts, found: limits.Limits
) -> dict[str, Any]:
    """Ratios, fractions of limits and figures with one model."""
    suite = next(suite for suite in plan.suites if suite.name == name)
    by_engine = {engine: run.figures for engine, run in runs.items()}
    peak = fractions.Peak(
        read_bytes_s=1e9 * found.read_gb_s.get(name, 0.0),
        float_ops_s=1e9 * limits.best_gop_s(found, plan.used_isa, "float"),
        int8_ops_s=1e9 * limits.best_gop_s(found, plan.used_isa, "int8"),
    )
    parts = fractions.fractions(by_engine.get("naru", {}), facts, peak, suite.scale)
    return {
        **report.ratios(by_engine, engines.PEERS),
        "fractions": [{**dataclasses.asdict(one), "of_limit": one.of_limit} for one in parts],
        "model": suite.model_path.name,
        "weight_mb": facts.weight_bytes / 1e6,
        "cases": list(suite.cases),
        "engines": {engine: dataclasses.asdict(run) for engine, run in runs.items()},
    }


def _warnings(by_suite: Mapping[str, Mapping[str, EngineRun]], here: machine.Machine) -> list[str]:
    found: list[str] = []
    for runs in by_suite.values():
        by_engine = {engine: run.figures for engine, run in runs.items()}
        found += [line for line in report.warnings(by_engine, here.load_average) if line not in found]
    return found


def without_requests(results: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the figures of single requests and processes."""
    kept = dict(results)
    kept["engines"] = {
        name: {**run, "runs": [{**one, "raw": [], "processes": []} for one in run["runs"]]}
        for name, run in results["engines"].items()
    }
    if "larger" in kept:
        kept["larger"] = without_requests(kept["larger"])
    return kept


def print_results(results: dict[str, Any], output: Path) -> None:
    """The tables, the worker's figures and what to know about them, on standard output."""
    restricted = f", all engines kept to {results['used_isa']}" if results["is_restricted"] else ""
    print(f"\n{results['cpu_model']}, {results['isa']}, {results['machine']['num_cores']} cores{restricted}")
    failures = []
    for part in (results, results.get("larger")):
        if part is None:
            continue
        by_engine = {name: run["figures"] for name, run in part["engines"].items()}
        print(f"\n{part['model']}, {part['weight_mb']:.0f} MB of weights\n")
        print(report.table(by_engine, engines.PEERS, part))
        if part["fractions"]:
            print("\nnaru beside this machine's limits, client to client\n")
            print(fractions.table([_fraction(one) for one in part["fractions"]]))
        failures += [
            f"{name}, {part['model']}: {run['failure']}" for name, run in part["engines"].items() if run["failure"]
        ]
    if results["limits"]["gop_s"]:
        print("\n" + limits.table(limits.Limits(**results["limits"])))
    if results["accuracy"]:
        print("\naccuracy against float32, " + results["accuracy"]["model"] + "\n")
        print(accuracy_table.table(results["accuracy"]))
    worker = results["naru_worker"]
    if "kv_waste" in worker:
        print(
            f"\nnaru's worker: start to first token {worker['start_to_first_token_s']:.2f} s, "
            f"KV waste {worker['kv_waste']:.1%}, memory beside weights and KV {worker['memory_overhead_mb']:.0f} MB"
        )
    for line in [*results["warnings"], *failures]:
        print(f"note: {line}")
    print(f"\nmeasured in {sum(results['took_s'].values()) / 60:.1f} minutes; written to {output}")


def _fraction(data: Mapping[str, Any]) -> fractions.Fraction:
    return fractions.Fraction(**{name: value for name, value in data.items() if name != "of_limit"})
