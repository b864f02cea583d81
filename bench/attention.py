"""Times the attention of prompt tokens alone, for one instruction set: ``python bench/attention.py``.

For people who tune it. Keys and values are random; nothing is downloaded. Prints a table and writes
bench/results/attention.json. The smallest of several runs counts, since other processes only ever add.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "worker" / "native")]

from prompt_attention import PromptAttention, Shape, queries  # noqa: E402

from naru_worker.native.isa import VARIANTS, detect_isa  # noqa: E402

SHAPES = (Shape(9, 3, 64), Shape(32, 8, 64), Shape(16, 8, 128))
"""SmolLM2-135M, Llama-3.2-1B and Qwen3-0.6B."""
RUNS = ((64, 0), (512, 0), (512, 1536), (512, 7680))
"""Tokens of a chunk, and tokens before them."""


def measure(isa: str, shape: Shape, count: int, position: int, threads: int, budget_s: float) -> dict[str, Any]:
    """Microseconds and GFLOP/s of one layer; only products that the causal mask leaves count as work."""
    kernel = PromptAttention(isa, shape, position + count, threads)
    q = queries(shape, count)
    once_s = thrice_s = float("inf")
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end:
        start = time.perf_counter()
        kernel.run(q, position)
        between = time.perf_counter()
        kernel.run(q, position, repeats=3)
        once_s, thrice_s = min(once_s, between - start), min(thrice_s, time.perf_counter() - between)
    kernel.close()
    # The difference leaves out what precedes the loop: making scratch.
    seconds = max(1e-9, (thrice_s - once_s) / 2)
    scores = sum(range(position + 1, position + count + 1)) * shape.num_heads
    return {
        "heads": f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim}",
        "tokens": count,
        "before": position,
        "us": seconds * 1e6,
        "gflop_per_s": 4.0 * scores * shape.head_dim / seconds / 1e9,
    }


def main() -> None:
    """Runs the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=list(VARIANTS), default=detect_isa())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line (1)")
    parser.add_argument("--peak", type=float, default=0.0, help="GFLOP/s of all threads together, for the last column")
    arguments = parser.parse_args()
    print(f"{arguments.isa}, {arguments.threads} threads")
    print(f"{'heads':>10}{'tokens':>8}{'before':>8}{'us':>10}{'GFLOP/s':>10}")
    table = []
    for shape in SHAPES:
        for count, position in RUNS:
            r = measure(arguments.isa, shape, count, position, arguments.threads, arguments.seconds)
            share = f"{r['gflop_per_s'] / arguments.peak:9.0%}" if arguments.peak else ""
            print(f"{r['heads']:>10}{count:8}{position:8}{r['us']:10.0f}{r['gflop_per_s']:10.0f}{share}", flush=True)
            table.append(r)
    target = ROOT / "bench" / "results" / "attention.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {"isa": arguments.isa, "threads": arguments.threads, "peak_gflop_per_s": arguments.peak, "table": table}
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
