"""What a decode step costs beside another busy process: ``python -m bench.contention [--isa NAME] [--threads N]``.

Times steps of one and of sixteen sequences alone, and beside a process that burns a part of one core in bursts, as a
router, a client or a neighbour does. Prints a table and writes bench/results/contention.json. Downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from bench.kernels import ROOT, decode_step, open_runner
from bench.machine import describe
from bench.stats import median

from naru_worker.native.isa import VARIANTS, detect_isa

BATCHES = (1, 16)
SHARES = (0, 10, 30, 100)
POSITION = 100
PERIOD_S = 0.005
"""Of the neighbour's bursts."""
GAP_S = 0.0003
"""Between steps, as an engine plans and sends."""

_BURNER = f"""
import sys, time
share = int(sys.argv[1]) / 100
while True:
    end = time.perf_counter() + share * {PERIOD_S}
    while time.perf_counter() < end:
        pass
    if share < 1:
        time.sleep((1 - share) * {PERIOD_S})
"""


@contextmanager
def neighbour(share_percent: int) -> Iterator[None]:
    """A process that burns so much of one core; none for 0."""
    if share_percent == 0:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _BURNER, str(share_percent)]) as process:
        try:
            time.sleep(0.2)
            yield
        finally:
            process.kill()


def step_times_ms(step: Callable[[], object], budget_s: float) -> list[float]:
    """Milliseconds of steps within a time budget, sorted."""
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not times:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
        time.sleep(GAP_S)
    return sorted(times)


def main() -> None:
    """Runs all pairs of batch and neighbour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", choices=list(VARIANTS), default=detect_isa())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="per row of the table")
    arguments = parser.parse_args()
    machine = describe()
    print(f"{machine.cpu_model}, {machine.num_cores} cores\n{arguments.isa}, {arguments.threads} threads\n")
    print(f"{'neighbour':>10}{'batch':>7}{'min ms':>9}{'median':>9}{'mean':>9}{'p99':>9}")
    rows: list[dict[str, Any]] = []
    runner = open_runner(arguments.isa, arguments.threads)
    for share in SHARES:
        for count in BATCHES:
            with neighbour(share):
                times = step_times_ms(decode_step(runner, count, POSITION), arguments.seconds)
            row = {
                "neighbour_percent": share,
                "batch": count,
                "min_ms": times[0],
                "median_ms": median(times),
                "mean_ms": sum(times) / len(times),
                "p99_ms": times[len(times) * 99 // 100],
            }
            rows.append(row)
            figures = "".join(f"{row[name]:9.2f}" for name in ("min_ms", "median_ms", "mean_ms", "p99_ms"))
            print(f"{share:9} %{count:7}{figures}", flush=True)
    runner.close()
    target = ROOT / "bench" / "results" / "contention.json"
    record = {"machine": asdict(machine), "isa": arguments.isa, "threads": arguments.threads, "steps": rows}
    target.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
