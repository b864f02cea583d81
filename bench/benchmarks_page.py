"""Prints docs/benchmarks.md from the stored whole runs: ``python -m bench.benchmarks_page``. Measures nothing.

Reads ``bench/results/runs`` (one file a run, which `bench.engine` leaves there) and ``bench/results/accuracy.json``.
Of each instruction set the newest three runs count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.accuracy_table import row_of
from bench.engine_results import RUNS_FOLDER
from bench.engines import PEERS
from bench.report import NAMES_OF_CASE, NAMES_OF_TIME, RATE_OF_CASE, TIMES
from bench.stats import median

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
ACCURACY_PATH = RUNS_FOLDER.parent / "accuracy.json"
NUM_RUNS = 3
TARGETS: Mapping[str, tuple[str, float, float]] = {
    "single": ("llamacpp", 1.5, 1.5),
    "conc16": ("best", 2.0, 4.0),
    "prefill": ("best", 1.5, 3.0),
    "shared": ("best", 2.0, 2.0),
    "ttft_p99": ("best", 2.0, 2.0),
}
"""The ratio that a figure has to reach: to whom, in general, and where all keep to AVX2."""
_SECTION = re.compile(r"(<!-- runs, printed by `python -m bench.benchmarks_page` -->\n).*?(\n<!-- end -->)", re.DOTALL)

Run = Mapping[str, Any]


def page(runs: Sequence[Run], accuracy: Mapping[str, Any] | None) -> str:
    """The printed part: a section for each machine and instruction set, then accuracy."""
    parts: list[str] = []
    groups: dict[tuple[str, str, bool], list[Run]] = {}
    for run in sorted(runs, key=lambda run: str(run["measured_at"])):
        groups.setdefault((run["cpu_model"], run["used_isa"], run["is_restricted"]), []).append(run)
    for group in groups.values():
        parts.append(_group(group[-NUM_RUNS:]))
    if accuracy is not None:
        parts.append(_accuracy(accuracy))
    return "\n\n".join(parts) if parts else "No whole run is stored yet."


def _group(runs: Sequence[Run]) -> str:
    """All runs of one machine with one instruction set."""
    last = runs[-1]
    machine = last["machine"]
    kept = ", all engines kept to it" if last["is_restricted"] else ""
    flags = (
        f"{last['cpu_model']}, {machine['num_cores']} cores, {machine['memory_gb']:.0f} GB, Linux {machine['kernel']}"
    )
    dates = ", ".join(run["measured_at"] for run in runs)
    lines = [f"## {last['used_isa']}{kept}", "", f"{flags}. Runs: {dates}.", ""]
    loads = [run["machine"]["load_average"] for run in runs]
    if max(loads) > 0.5:
        lines += [
            f"Load average before the runs: {', '.join(f'{load:.1f}' for load in loads)}; a busy machine is noisy.",
            "",
        ]
    lines += _engines_table(last)
    for name in ("", "larger"):
        chosen = [run[name] if name else run for run in runs if not name or name in run]
        if chosen:
            lines += ["", f"### {chosen[-1]['model']}, {chosen[-1]['weight_mb']:.0f} MB of weights", ""]
            lines += _figures_table(chosen, last["used_isa"])
            lines += ["", *_fractions_table(chosen)]
    lines += ["", *_limits_table(runs)]
    return "\n".join(lines)


def _engines_table(run: Run) -> list[str]:
    lines = ["| engine | version | settings that won a case |", "|---|---|---|"]
    for name, engine in run["engines"].items():
        version = next((one["version"] for one in engine["runs"]), "")
        settings = "<br>".join(sorted(set(engine["best_settings"].values())))
        lines.append(f"| {name} | {version} | {settings} |")
    return lines


def _figures_table(runs: Sequence[Run], isa: str) -> list[str]:
    """Medians over runs, and each run's ratio to the better peer."""
    numbers = " | ".join(f"run {index + 1}" for index in range(len(runs)))
    lines = [
        f"| median of {len(runs)} | naru | {' | '.join(PEERS)} | target | {numbers} |",
        "|---|" + "---:|" * (2 + len(PEERS) + len(runs)),
    ]
    rates = {case: (f"{NAMES_OF_CASE[case]} (tok/s)", case, figure) for case, figure in RATE_OF_CASE.items()}
    times = {short: (NAMES_OF_TIME[short], case, figure) for short, (case, figure) in TIMES.items()}
    for short, (label, case, figure) in (rates | times).items():
        cells = [_number([_figure(run, engine, case, figure) for run in runs]) for engine in ("naru", *PEERS)]
        against, usual, on_avx2 = TARGETS.get(short, ("best", 0.0, 0.0))
        wanted = on_avx2 if isa == "avx2" else usual
        target = f"{wanted:g} × {against}" if wanted else ""
        ratios = [_ratio(run.get(f"{short}_vs_{against}"), wanted) for run in runs]
        if cells[0] != "-":
            lines.append(f"| {label} | {' | '.join(cells)} | {target} | {' | '.join(ratios)} |")
    return lines


def _fractions_table(runs: Sequence[Run]) -> list[str]:
    lines = ["| naru, tokens/s | measured | by reading | by float | by int8 | of limit |", "|---|" + "---:|" * 5]
    for case in [one["case"] for one in runs[-1]["fractions"]]:
        found = [one for run in runs for one in run["fractions"] if one["case"] == case]
        names = ("measured_tok_s", "read_limit_tok_s", "float_limit_tok_s", "int8_limit_tok_s")
        cells = [f"{median([one[name] for one in found]):.0f}" for name in names]
        part = f"{median([one['of_limit'] for one in found]):.0%}"
        lines.append(f"| {case} | {' | '.join(cells)} | {part} |")
    return lines


def _limits_table(runs: Sequence[Run]) -> list[str]:
    cores = runs[-1]["limits"]["num_cores"]
    lines = [f"| limit of the machine, best of the runs | one core | {cores} cores |", "|---|---:|---:|"]
    for kind, unit in (("read", "gb_s"), ("gop", "s")):
        one, every = (f"{kind}_one_core_{unit}", f"{kind}_{unit}")
        for name in runs[-1]["limits"][every]:
            alone, together = (max(run["limits"][key].get(name, 0.0) for run in runs) for key in (one, every))
            label = f"reading, GB/s: {name}" if kind == "read" else f"{name}, 10⁹ operations/s"
            lines.append(f"| {label} | {alone:.1f} | {together:.1f} |")
    return lines


def _accuracy(data: Mapping[str, Any]) -> str:
    """KL divergence by format and rows, engines side by side."""
    lines = [
        "## Accuracy",
        "",
        f"{data['model']} and files made from it, {data['scored_rows']} tokens of `{data['text']}`; "
        f"{data['measured_at']}. KL divergence in 10⁻³ nats from float32 with the same file's weights, and from the "
        "float32 weights the files were made from.",
        "",
        "| weights | KV | rows | engine | perplexity | mean KL | p99 KL | same first token | mean KL from source |",
        "|---|---|---|---|" + "---:|" * 5,
    ]
    for row in map(row_of, data["rows"]):
        own = row.own
        engine = f"{row.engine} {row.isa}".strip()
        lines.append(
            f"| {row.weights} | {row.kv} | {row.kind} | {engine} | {own.perplexity:.3f} | {1e3 * own.mean_kl:.2f} | "
            f"{1e3 * own.p99_kl:.2f} | {own.same_top:.1%} | {1e3 * row.source_mean_kl:.2f} |"
        )
    return "\n".join(lines)


def _figure(run: Run, engine: str, case: str, figure: str) -> float | None:
    value: float | None = run["engines"].get(engine, {}).get("figures", {}).get(case, {}).get(figure)
    return value


def _number(values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    middle = median(present)
    return f"{middle:.0f}" if middle >= 100 else f"{middle:.1f}"


def _ratio(value: float | None, wanted: float) -> str:
    """Bold where it reaches its target."""
    if value is None:
        return "-"
    return f"**{value:.2f}×**" if wanted and value >= wanted else f"{value:.2f}×"


def replaced(text: str, printed: str) -> str:
    """The page with a new printed part.

    Raises:
        ValueError: the page has no place for it.
    """
    result, count = _SECTION.subn(lambda match: f"{match[1]}\n{printed}\n{match[2]}", text)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for the runs, expected one")
    return result


def main() -> int:
    """The command: rewrites the page."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS_FOLDER.glob("engine-*.json"))]
    accuracy = json.loads(ACCURACY_PATH.read_text(encoding="utf-8")) if ACCURACY_PATH.is_file() else None
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), page(runs, accuracy)), encoding="utf-8")
    print(f"{PAGE}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
