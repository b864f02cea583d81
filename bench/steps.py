"""Where a step of Naru's engine spends its time, in one process: ``python -m bench.steps``. For people who tune it.

Loads the model as a worker does and wraps the parts of its engine in clocks; no server, no text over a wire. It reaches
into private attributes of the engine, and says so with an AttributeError when those have moved.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.engines import find_model
from bench.machine import describe
from bench.peers import PeerError
from bench.stats import median

from naru_proto.errors import NaruError
from naru_worker.adapters.engine.deltas import Outbox
from naru_worker.adapters.engine.engine import ModelEngine
from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.adapters.engine.loading import DiskLoader
from naru_worker.adapters.engine.wiring import EngineRoom
from naru_worker.adapters.memory.bookings import Bookings
from naru_worker.adapters.memory.ledger import MemoryLedger
from naru_worker.core.request import Request, RequestId
from naru_worker.core.residency import LoadOptions, ModelSpec
from naru_worker.core.sampling import SamplingParams
from naru_worker.settings import EngineSettings, MemorySettings

KV_CACHE_BYTES = 512 * 2**20
NATIVE, RUN = "native step", "arguments of the native step"
PARTS = (NATIVE, RUN, "plan", "batch arrays", "sampling arrays", "commit", "text and deltas")
"""In the order they are printed; what is left of a step is its own line."""


@dataclass
class Clocks:
    """Nanoseconds spent in each part of the current step. RUN holds NATIVE until `end_step` takes it out."""

    spent_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to a part."""

        def call(*arguments: Any) -> Any:
            started_ns = time.perf_counter_ns()
            try:
                return function(*arguments)
            finally:
                self.spent_ns[part] += time.perf_counter_ns() - started_ns

        return call

    def end_step(self) -> dict[str, int]:
        """The parts of the step, each without the others; starts anew."""
        step = dict(self.spent_ns)
        step[RUN] -= step[NATIVE]
        self.spent_ns = dict.fromkeys(PARTS, 0)
        return step


class Clocked:
    """Stands for an object, with some of its methods timed."""

    def __init__(self, target: Any, clocks: Clocks, parts: dict[str, str]) -> None:
        """`parts`: method name to part."""
        self._target = target
        for name, part in parts.items():
            setattr(self, name, clocks.timed(part, getattr(target, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def attach(engine: ModelEngine, clocks: Clocks) -> None:
    """Replaces the parts of an engine by timed ones."""
    inside: Any = engine
    inside._scheduler = Clocked(inside._scheduler, clocks, {"plan": "plan", "commit": "commit"})
    inside._batches = Clocked(inside._batches, clocks, {"build": "batch arrays"})
    inside._samplings = Clocked(inside._samplings, clocks, {"build": "sampling arrays"})
    inside._deliver = clocks.timed("text and deltas", inside._deliver)
    runner = inside._runner
    runner._library = Clocked(runner._library, clocks, {"naru_step": NATIVE})
    inside._runner = Clocked(runner, clocks, {"run": RUN})


def run_steps(
    engine: ModelEngine, clocks: Clocks, prompts: Sequence[tuple[int, ...]], num_steps: int, *, prefill: bool
) -> list[tuple[int, dict[str, int]]]:
    """(nanoseconds, parts) of steps: the prompts' own with `prefill`, else `num_steps` decodes after them."""
    outbox: Outbox = []
    params = SamplingParams(temperature=0.0, max_tokens=1 if prefill else num_steps + 1, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        request_id = RequestId(f"{time.perf_counter_ns()}-{index}")
        engine.submit(Request(request_id, prompt, params, 0, index), time.monotonic(), outbox)
    steps: list[tuple[int, dict[str, int]]] = []
    while engine.has_work:
        decodes = engine.stats.num_waiting == 0 and bool(outbox)
        started_ns = time.perf_counter_ns()
        engine.step(outbox)
        total_ns = time.perf_counter_ns() - started_ns
        parts = clocks.end_step()
        if prefill or decodes:
            steps.append((total_ns, parts))
    engine.rest()
    failed = next((delta.error for delta in outbox if delta.error is not None), None)
    if failed is not None:
        raise failed
    return steps


def print_steps(title: str, steps: Sequence[tuple[int, dict[str, int]]]) -> None:
    """Medians over the steps, in microseconds and in parts of the step."""
    total_us = median([total for total, _ in steps]) / 1e3
    print(f"\n{title}: {total_us:.0f} µs a step, median of {len(steps)}")
    for part in PARTS:
        part_us = median([parts[part] for _, parts in steps]) / 1e3
        print(f"  {part:<30}{part_us:>9.1f} µs {part_us / total_us:>6.1%}")
    rest_us = median([total - sum(parts.values()) for total, parts in steps]) / 1e3
    print(f"  {'everything else':<30}{rest_us:>9.1f} µs {rest_us / total_us:>6.1%}")


def load(path: str | None, num_threads: int, speculation: str | None = None) -> LoadedModel:
    """The model with the worker's defaults.

    Raises:
        PeerError: no such file.
        LoadError: it cannot be served.
    """
    model_path = find_model(path)
    room = EngineRoom(EngineSettings(), MemorySettings(), num_threads, MemoryLedger(8 * KV_CACHE_BYTES))
    spec = ModelSpec(model_path.as_uri(), options=LoadOptions(kv_cache_bytes=KV_CACHE_BYTES, speculation=speculation))
    stop = threading.Event()
    prepared = DiskLoader(room, None, None).prepare("bench", spec, lambda progress: None, stop)
    Bookings(room.ledger).take("bench", prepared.footprint)
    return prepared.open().load(lambda model: None, stop)


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--batch", default="1,16", help="sequences that decode together, comma-separated (1,16)")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each (128)")
    parser.add_argument("--steps", type=int, default=100, help="decode steps (100)")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prefill, 0: none (2048)")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute, 0: all cores (0)")
    parser.add_argument("--model", default=None, help="a GGUF file")
    arguments = parser.parse_args(argv)
    here = describe()
    num_threads = arguments.threads or here.num_cores
    try:
        model = load(arguments.model, num_threads)
    except (PeerError, NaruError) as exc:
        print(f"steps: {exc}", file=sys.stderr)
        return 1
    print(f"{here.cpu_model}, {here.isa}, {num_threads} threads, load average {os.getloadavg()[0]:.2f}")
    engine, clocks = model.engine, Clocks()
    assert isinstance(engine, ModelEngine)
    attach(engine, clocks)
    rng = random.Random(1)

    def prompts(count: int, length: int) -> list[tuple[int, ...]]:
        return [tuple(rng.randrange(1000, 20000) for _ in range(length)) for _ in range(count)]

    run_steps(engine, clocks, prompts(1, 16), 8, prefill=False)
    for batch in (int(part) for part in arguments.batch.split(",")):
        steps = run_steps(engine, clocks, prompts(batch, arguments.context), arguments.steps, prefill=False)
        print_steps(f"decode, {batch} at once, {arguments.context} tokens before", steps)
    if arguments.prefill:
        steps = run_steps(engine, clocks, prompts(1, arguments.prefill), 1, prefill=True)
        print_steps(f"prefill of {arguments.prefill} tokens", steps)
    model.release()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
