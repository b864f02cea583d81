"""What a JSON schema costs of decode throughput: 16 streams with it against the same 16 without.

The engine alone, in this process, so that nothing else is measured. Blocks of steps with and without take turns; each
pair of neighbours gives one ratio of their medians, and the median of all pairs counts: what the machine does beside
hits both of a pair.
"""

from __future__ import annotations

import json
import time
from typing import Any

from bench.stats import median, percentile
from bench.structured_engine import StructuredEngine, chat

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.structured import StructuredKind, StructuredOutput

NUM_STREAMS = 16
NUM_TOKENS = 64
NUM_ROUNDS = 12
TEMPERATURES = (0.0, 0.8)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string"},
        "city": {"type": "string"},
        "kind": {"enum": ["friend", "family", "colleague"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "email", "city", "kind", "active"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    # More of them than are ever written: no stream ends early.
    "properties": {"people": {"type": "array", "items": PERSON, "minItems": 50}},
    "required": ["people"],
    "additionalProperties": False,
}


def run() -> dict[str, Any]:
    """The share of throughput that the schema costs: the larger one of greedy and drawn tokens; and details."""
    bench = StructuredEngine()
    details: dict[str, Any] = {"streams": NUM_STREAMS, "tokens_a_stream": NUM_TOKENS, "rounds": NUM_ROUNDS}
    print(
        f"{'temperature':>12} {'free ms/step':>13} {'schema ms/step':>15} {'free tok/s':>11} {'schema tok/s':>13} cost"
    )
    for temperature in TEMPERATURES:
        found = _compare(bench, temperature)
        details[f"temperature_{temperature:g}"] = found
        print(
            f"{temperature:12g} {found['free_step_ms']:13.2f} {found['schema_step_ms']:15.2f} "
            f"{found['free_tokens_per_s']:11.0f} {found['schema_tokens_per_s']:13.0f} {found['cost_ratio']:.3f}",
            flush=True,
        )
    worst = max(details[f"temperature_{temperature:g}"]["cost_ratio"] for temperature in TEMPERATURES)
    return {"structured_cost_ratio": worst, "structured": details}


def _compare(bench: StructuredEngine, temperature: float) -> dict[str, Any]:
    wish = StructuredOutput(StructuredKind.JSON_SCHEMA, (json.dumps(SCHEMA),))
    for each in (None, wish):
        _steps_s(bench, temperature, each)  # warm
    free: list[float] = []
    schema: list[float] = []
    ratios: list[float] = []
    for number in range(NUM_ROUNDS):
        pair: dict[StructuredOutput | None, list[float]] = {}
        for each in (None, wish) if number % 2 == 0 else (wish, None):
            pair[each] = _steps_s(bench, temperature, each)
        free += pair[None]
        schema += pair[wish]
        ratios.append(median(pair[None]) / median(pair[wish]))
    return {
        "free_step_ms": median(free) * 1e3,
        "schema_step_ms": median(schema) * 1e3,
        "free_step_p10_ms": percentile(free, 10) * 1e3,
        "schema_step_p10_ms": percentile(schema, 10) * 1e3,
        "free_tokens_per_s": NUM_STREAMS / median(free),
        "schema_tokens_per_s": NUM_STREAMS / median(schema),
        "pair_cost_ratios": [round(1.0 - ratio, 4) for ratio in ratios],
        "cost_ratio": 1.0 - median(ratios),
    }


def _steps_s(bench: StructuredEngine, temperature: float, wish: StructuredOutput | None) -> list[float]:
    """Seconds of each step in which all streams decode."""
    outbox: list[SequenceDelta] = []
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, structured=wish)
    for number in range(NUM_STREAMS):
        bench.submit(chat(f"List many people as JSON, beginning with number {number}."), params, outbox)
    counters, taken = bench.scheduler.counters, []
    while bench.engine.has_work:
        before, started_s = counters.generated_tokens, time.perf_counter()
        bench.engine.step(outbox)
        step_s = time.perf_counter() - started_s
        if counters.generated_tokens - before == NUM_STREAMS and bench.scheduler.num_waiting == 0:
            taken.append(step_s)
    errors = [delta.error for delta in outbox if delta.error is not None]
    if errors:
        raise errors[0]
    return taken[1:-1]  # the first one may hold prompts as well


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
