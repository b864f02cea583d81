"""The router beside vLLM's and SGLang's: ``make bench-router`` runs ``python -m bench.router``.

One fake backend on one core, the routers in turns and a compiled load generator on the other, all in one run. README.md
in `bench` says how to read the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from bench import machine
from bench.report import rounded
from bench.router import decision, stand
from bench.router.cases import Effort, Figures, measure
from bench.router.parts import CACHE, ROOT, PartError, build
from bench.router.report import DIRECT, RUST, missed, summarize, table
from bench.router.stand import Backend, Cores, Target

RESULTS = ROOT / "bench" / "results" / "router.json"
PASSTHROUGH = "uvicorn + aiohttp"
ORDER = (DIRECT, "naru", *RUST, PASSTHROUGH)


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table, writes the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ORDER), help=f"some of: {', '.join(ORDER)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each shot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1_000_000, help="over which Naru's memory is watched; 0: not")
    parser.add_argument("--output", type=Path, help="where results go; by default bench/results for a whole run")
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.only.split(",")]
    unknown = [name for name in names if name not in ORDER]
    if unknown:
        parser.error(f"no router is called {unknown[0]!r}; known: {', '.join(ORDER)}")
    about = machine.describe()
    try:
        routers = _measure_all(list(dict.fromkeys([DIRECT, "naru", *names])), options)
    except PartError as exc:
        print(f"bench-router: {exc}", file=sys.stderr)
        return 1
    times = decision.measure()
    summary = summarize(routers, times)
    print(table(routers, summary, times))
    late = missed(summary)
    if late:
        print(f"not as it should be: {', '.join(late)}")
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **dataclasses.asdict(summary),
        "missed": late,
        "decision": dataclasses.asdict(times),
        "machine": dataclasses.asdict(about),
        "step_s": stand.STEP_S,
        "routers": {name: dataclasses.asdict(figures) for name, figures in routers.items()},
    }
    is_whole = set(names) == set(ORDER) and options.requests >= 1_000_000
    output = options.output or (RESULTS if is_whole else CACHE / "router.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(rounded(result), indent=1) + "\n")
    print(f"written to {output}")
    return 0


def _measure_all(names: Sequence[str], options: argparse.Namespace) -> dict[str, Figures]:
    programs, cores = build(), stand.pick_cores()
    with stand.backend(programs.backend, cores) as behind, ExitStack() as running:
        targets = []
        for name in names:
            print(f"starting {name}", flush=True)
            targets.append(running.enter_context(_target(name, behind, cores)))
        print("measuring", flush=True)
        return measure(programs.load, cores, targets, Effort(options.seconds, options.rounds, options.requests))


def _target(name: str, behind: Backend, cores: Cores) -> AbstractContextManager[Target]:
    if name == DIRECT:
        return nullcontext(Target(name, behind.http_port))
    if name == "naru":
        return stand.naru(behind, cores)
    return stand.passthrough(behind, cores) if name == PASSTHROUGH else stand.rust(name, behind, cores)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
