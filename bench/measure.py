"""Runs the cases against one running server and checks that it did the work it was asked for.

Called by `engine`. Sends nothing itself: each batch goes out from a client process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import slots
from bench.servers import POLL_S, Server
from bench.stream import Timing
from bench.workload import WARM, Ask, Batch, CaseName, Scale, batches

REQUEST_TIMEOUT_S = 300.0
_ROOT = Path(__file__).resolve().parent.parent


class MeasureError(Exception):
    """A server failed a request or gave other token counts than asked for: its figures would not compare."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One batch, sent once."""

    case: CaseName
    repeat: int
    measured: bool
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float
    timings: tuple[Timing, ...]


def wait_until_serving(server: Server, timeout_s: float) -> None:
    """Returns when a one-token completion is answered: a server may be up before its model is.

    Raises:
        MeasureError: still refused after that long; carries the last refusal.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        server.check_alive()
        report = _run_client(server, [_body(server.spec.model, Ask("Hello", 1, 1))])
        error = report.get("error") or report["requests"][0].get("error")
        if error is None:
            return
        if time.monotonic() > deadline_s:
            raise MeasureError(f"{server.spec.name} serves nothing after {timeout_s:g} s: {error}")
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a case is measured."""

    most: int
    budget_s: float
    """After so long no further round is begun; the first one always is."""
    spread: float = 0.03
    """Three rounds whose wall times lie within this part of each other are enough."""

    def are_enough(self, walls_s: Sequence[float], elapsed_s: float) -> bool:
        """Whether the rounds so far will do."""
        if not walls_s:
            return False
        is_steady = len(walls_s) >= 3 and max(walls_s) - min(walls_s) <= self.spread * min(walls_s)
        return len(walls_s) >= self.most or elapsed_s >= self.budget_s or is_steady


def run_case(
    server: Server,
    case: CaseName,
    words: Sequence[str],
    seed: int,
    scale: Scale,
    repeats: Repeats,
    progress: Callable[[str], None],
    *,
    warms: bool,
) -> list[Measurement]:
    """Rounds with prompts never seen before; with `warms` a short one that is thrown away comes first.

    Raises:
        MeasureError: a request failed or its usage is not what was asked for.
    """
    if warms:
        for batch in batches(case, words, seed, -1, WARM):
            run_batch(server, batch, -1)
    results: list[Measurement] = []
    walls_s: list[float] = []
    started_s = time.monotonic()
    while not repeats.are_enough(walls_s, time.monotonic() - started_s):
        progress(f"{server.spec.name}: {case}, round {len(walls_s) + 1} of at most {repeats.most}")
        rounds = [
            run_batch(server, batch, len(walls_s)) if batch.measured else prepare(server, batch, len(walls_s))
            for batch in batches(case, words, seed, len(walls_s), scale)
        ]
        walls_s.append(sum(one.wall_s for one in rounds if one.measured))
        results += rounds
    return results


def prepare(server: Server, batch: Batch, repeat: int) -> Measurement:
    """Sends an unmeasured batch; where the server keeps its slot's state, it is brought back before, or kept after.

    Raises:
        MeasureError: as `run_case`.
    """
    text = batch.asks[0].prompt
    is_there = slots.restored(server.spec, text)
    done = run_batch(server, batch, repeat)
    if not is_there:
        slots.keep(server.spec, text)
    return done


def run_batch(server: Server, batch: Batch, repeat: int) -> Measurement:
    """Sends one batch.

    Raises:
        MeasureError: as `run_case`.
    """
    cpu_before_s = server.usage().cpu_s
    after = [ask.after_chunks for ask in batch.asks]
    report = _run_client(server, [_body(server.spec.model, ask) for ask in batch.asks], after)
    server.check_alive()
    if "error" in report:
        raise MeasureError(f"{server.spec.name}, {batch.case}: {report['error']}")
    timings = tuple(
        _checked(server, batch, ask, entry) for ask, entry in zip(batch.asks, report["requests"], strict=True)
    )
    return Measurement(
        case=batch.case,
        repeat=repeat,
        measured=batch.measured,
        wall_s=report["wall_s"],
        client_cpu_s=report["client_cpu_s"],
        server_cpu_s=server.usage().cpu_s - cpu_before_s,
        timings=timings,
    )


def to_json(measurement: Measurement) -> dict[str, Any]:
    """For the raw figures in the results file: one line a request, gaps left out."""
    data = asdict(measurement)
    for timing in data["timings"]:
        del timing["gaps_s"]
    return data


def _body(model: str, ask: Ask) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _run_client(server: Server, bodies: Sequence[dict[str, Any]], after: Sequence[int] = ()) -> dict[str, Any]:
    job = {
        "host": "127.0.0.1",
        "port": server.spec.port,
        "bodies": list(bodies),
        "timeout_s": REQUEST_TIMEOUT_S,
        "after": list(after),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.client"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        cwd=_ROOT,
        timeout=REQUEST_TIMEOUT_S + 60,
    )
    if done.returncode != 0:
        raise MeasureError(f"the client ended with code {done.returncode}: {done.stderr[-1000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _checked(server: Server, batch: Batch, ask: Ask, entry: dict[str, Any]) -> Timing:
    where = f"{server.spec.name}, {batch.case}"
    if "error" in entry:
        raise MeasureError(f"{where}: {entry['error']}")
    timing = Timing(**{**entry, "gaps_s": tuple(entry["gaps_s"])})
    counts = (timing.prompt_tokens, timing.completion_tokens)
    if counts != (ask.prompt_tokens, ask.max_tokens):
        raise MeasureError(
            f"{where}: asked for {ask.prompt_tokens} tokens in and {ask.max_tokens} out, the server counted "
            f"{counts[0]} in and {counts[1]} out"
        )
    return timing
