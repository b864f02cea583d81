"""`make bench-api`: what the parts of the API cost, beside others where there are any.

Four parts, one after another, each in a module of its own: structured output at 16 streams, tool calls read from a
stream, embeddings beside other engines on the same model, and a batch beside 64 live streams. Prints a table and
writes bench/results/api.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench import machine

RESULTS = Path(__file__).parent / "results" / "api.json"
PARTS = ("structured", "tools", "embeddings", "batches")
_TARGETS = {
    "structured_cost_ratio": ("share of decode throughput that a schema costs, 16 streams", "<", 0.05),
    "us_per_token_tools": ("µs a token, from its text to events with tool calls", "<", 30.0),
    "embeddings_vs_best_peer": ("texts a second ÷ the best peer's", ">=", 1.0),
    "batch_vs_live_ratio": ("a batch's tokens a second ÷ those of 64 live streams", ">=", 0.95),
}
"""Figures that the parts give, and what they should be."""


def run(part: str) -> dict[str, Any]:
    """One part's figures; the summary by the names above, its details beside it."""
    print(f"== {part}", flush=True)
    started_s = time.monotonic()
    figures: dict[str, Any] = importlib.import_module(f"bench.api_{part}").run()
    print(f"   {time.monotonic() - started_s:.0f} s", flush=True)
    return figures


def table(figures: dict[str, Any]) -> str:
    """A line a figure."""
    lines = []
    for name, (meaning, word, target) in _TARGETS.items():
        if name in figures:
            value = figures[name]
            is_met = value < target if word == "<" else value >= target
            lines.append(f"{name:26} {value:8.3f}   {word} {target:g}: {'ok' if is_met else 'MISSED'}   {meaning}")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these; by default all")
    parser.add_argument("--output", type=Path, help="where results go; by default bench/results for a whole run")
    options = parser.parse_args()
    parts = options.parts or PARTS
    found: dict[str, Any] = {}
    for part in parts:
        found |= run(part)
    print(table(found))
    output = options.output or (RESULTS if len(parts) == len(PARTS) else None)
    if output is not None:
        output.write_text(
            json.dumps({"machine": dataclasses.asdict(machine.describe()), **found}, indent=2) + "\n", "utf-8"
        )
        print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
