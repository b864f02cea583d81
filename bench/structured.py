"""Random JSON schemas through the real model: how many of the texts that it writes validate.

``python -m bench.structured [--count 1000] [--seed 0]``: tokens are drawn (temperature 0.8, top-p 0.95), 32 requests at
a time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from bench.random_schemas import random_schema, validator_of
from bench.structured_engine import MAX_NUM_SEQS, StructuredEngine, chat

from naru_worker.adapters.engine.deltas import SequenceDelta
from naru_worker.core.request import FinishReason, RequestId
from naru_worker.core.sampling import SamplingParams
from naru_worker.core.structured import StructuredKind, StructuredOutput

MAX_TOKENS = 3000


def run(count: int, seed: int) -> dict[str, Any]:
    """How many of `count` schemas were asked for, ended by themselves, and validate; prints failures as they come."""
    bench = StructuredEngine()
    outbox: list[SequenceDelta] = []
    schemas: dict[RequestId, dict[str, Any]] = {}
    ended: dict[RequestId, tuple[str, FinishReason | None, str]] = {}
    texts: dict[RequestId, str] = {}
    failures: list[str] = []
    num_valid = num_done = 0
    numbers, started_s = iter(range(seed, seed + count)), time.monotonic()
    while True:
        while len(schemas) < MAX_NUM_SEQS and (number := next(numbers, None)) is not None:
            schema = random_schema(number)
            wish = StructuredOutput(StructuredKind.JSON_SCHEMA, (json.dumps(schema),))
            params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=MAX_TOKENS, seed=number, structured=wish)
            schemas[bench.submit(chat("Write some JSON."), params, outbox)] = schema
        if not schemas:
            break
        bench.engine.step(outbox)
        for delta in outbox:
            texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
            if delta.is_last:
                error = "" if delta.error is None else delta.error.message
                ended[delta.request_id] = (texts.pop(delta.request_id), delta.finish_reason, error)
        outbox.clear()
        for request_id, (text, reason, error) in ended.items():
            schema = schemas.pop(request_id)
            fault = error or _fault(schema, text, reason)
            num_valid += not fault
            num_done += 1
            if num_done % 100 == 0:
                print(f"{num_valid} of {num_done} so far", flush=True)
            if fault:
                failures.append(f"{fault}\n  {json.dumps(schema)}\n  {text}")
                print(failures[-1], flush=True)
        ended.clear()
    return {"count": count, "valid": num_valid, "failures": failures, "seconds": time.monotonic() - started_s}


def _fault(schema: dict[str, Any], text: str, reason: FinishReason | None) -> str:
    if reason is not FinishReason.STOP:
        return f"it ended with {reason}"
    try:
        errors = [error.message for error in validator_of(schema).iter_errors(json.loads(text))]
    except ValueError as exc:
        return f"no JSON: {exc}"
    return "; ".join(errors)


def main() -> int:
    """Prints the count, and every failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = run(options.count, options.seed)
    print(f"{found['valid']} of {found['count']} random schemas validate, in {found['seconds']:.0f} s")
    return 0 if found["valid"] == found["count"] else 1


if __name__ == "__main__":
    sys.exit(main())
