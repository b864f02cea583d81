"""Runs the simulator: ``make bench-sim``, or ``python -m bench.sim``.

Compares eviction policies on the same requests, prints the table and writes it as JSON. With ``--scenario SEED`` it
runs one small random scenario of the tests instead and prints its trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.sim.clock import InvariantViolation
from bench.sim.comparison import compare, measure_decisions, run_fleet
from bench.sim.report import PageError, as_json, printed, summary, table
from bench.sim.scenario import run_scenario, scenario_of

_ROOT = Path(__file__).resolve().parents[2]
RESULTS_PATH = _ROOT / "bench" / "results" / "sim.json"
PAGE_PATH = _ROOT / "docs" / "residency.md"


def main(arguments: Sequence[str]) -> int:
    """The command; 1 when something that must hold did not."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of models and requests")
    parser.add_argument("--write-docs", action="store_true", help="refreshes the table in docs/residency.md")
    parser.add_argument("--output", type=Path, default=RESULTS_PATH, help="where the figures go")
    parser.add_argument("--scenario", type=int, metavar="SEED", help="prints the trace of one small random scenario")
    options = parser.parse_args(arguments)
    try:
        if options.scenario is not None:
            return _show_scenario(options.scenario)
        _compare(options.seeds, options.output, write_docs=options.write_docs)
    except PageError as error:
        sys.stderr.write(f"{PAGE_PATH.name}: {error}\n")
        return 1
    except InvariantViolation as violation:
        sys.stderr.write("\n".join((str(violation), *getattr(violation, "__notes__", ()))) + "\n")
        return 1
    return 0


def _show_scenario(seed: int) -> int:
    report = run_scenario(scenario_of(seed), keep_trace=True)
    sys.stdout.write("\n".join(report.trace) + "\n")
    return 0


def _compare(seeds: Sequence[int], output: Path, *, write_docs: bool) -> None:
    host = dataclasses.asdict(machine.describe())
    figures = compare(seeds)
    sys.stdout.write(table(figures) + "\n")
    decisions, fleet = measure_decisions(seeds[0]), run_fleet(seeds[0])
    sys.stdout.write(summary(decisions, fleet))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(as_json(seeds, figures, decisions, fleet, host), indent=2) + "\n", encoding="utf-8")
    if write_docs:
        PAGE_PATH.write_text(printed(PAGE_PATH.read_text(encoding="utf-8"), figures), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
