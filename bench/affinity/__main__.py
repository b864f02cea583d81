"""How well requests meet their cached prefixes on real workers: ``make bench-affinity``.

Four workers with the small model, two routers that clients take in turn, two kinds of traffic; each once with Naru's
routing and once in turn over the workers. Prints a table and writes bench/results/affinity.json.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from bench import machine
from bench.affinity.instance import MODEL, Instance, InstanceError
from bench.affinity.traffic import Oracle, Session, multi_turn, shared_prefix
from bench.stats import percentile

RESULTS = Path(__file__).parents[1] / "results" / "affinity.json"
NUM_WORKERS = 4
NUM_ROUTERS = 2
NUM_CLIENTS = 4
MAX_TOKENS = 16
STRATEGIES = ("PrefixAffinity", "RoundRobin")
MAX_DISTANCE = 0.03
MIN_SPEEDUP = 1.5


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as its client saw it."""

    sent_s: float
    prompt: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


async def chat(client: httpx.AsyncClient, url: str, session: Session, said: list[dict[str, str]]) -> Asked:
    """Sends the next turn and adds the answer to what was said."""
    messages = [{"role": "system", "content": session.system}, *said]
    body = {
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = time.perf_counter()
    first_s, parts = 0.0, list[str]()
    usage: dict[str, Any] = {}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.perf_counter()
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    said.append({"role": "assistant", "content": "".join(parts)})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(sent_s, json.dumps(messages), first_s - sent_s, usage["prompt_tokens"], cached)


async def drive(urls: tuple[str, ...], sessions: tuple[Session, ...]) -> list[Asked]:
    """A few clients take sessions one after another; each request goes to the next router in turn."""
    asked: list[Asked] = []
    waiting = list(reversed(sessions))
    num_sent = 0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300.0, trust_env=False, limits=limits) as client:

        async def work() -> None:
            nonlocal num_sent
            while waiting:
                session = waiting.pop()
                said: list[dict[str, str]] = []
                for turn in session.turns:
                    said.append({"role": "user", "content": turn})
                    url = urls[num_sent % len(urls)]
                    num_sent += 1
                    asked.append(await chat(client, url, session, said))

        await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
    return asked


def figures(asked: list[Asked]) -> dict[str, float]:
    """Of one run."""
    oracle = Oracle()
    for each in sorted(asked, key=lambda it: it.sent_s):
        oracle.ask(each.prompt, each.prompt_tokens)
    ttfts_s = [each.ttft_s for each in asked]
    return {
        "num_requests": len(asked),
        "prompt_tokens": sum(each.prompt_tokens for each in asked),
        "hit_ratio": sum(each.cached_tokens for each in asked) / sum(each.prompt_tokens for each in asked),
        "oracle_hit_ratio": oracle.hit_ratio,
        "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
        "ttft_p50_s": percentile(ttfts_s, 50),
        "ttft_p99_s": percentile(ttfts_s, 99),
    }


def run(sessions: tuple[Session, ...], strategy: str) -> dict[str, float]:
    """One kind of traffic under one strategy, on a fresh instance."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Instance(Path(folder), num_workers=NUM_WORKERS, num_routers=NUM_ROUTERS, strategy=strategy) as instance,
    ):
        return figures(asyncio.run(drive(instance.urls, sessions)))


def report(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Prints the table; what it says as data."""
    print(
        f"{'traffic':<14} {'strategy':<15} {'requests':>8} {'hit ratio':>9} {'oracle':>6} {'TTFT mean':>10} {'p99':>8}"
    )
    summary: dict[str, Any] = {}
    for kind, by_strategy in results.items():
        for strategy, it in by_strategy.items():
            print(
                f"{kind:<14} {strategy:<15} {it['num_requests']:>8.0f} {it['hit_ratio']:>9.3f} "
                f"{it['oracle_hit_ratio']:>6.3f} {it['ttft_mean_s'] * 1e3:>7.0f} ms {it['ttft_p99_s'] * 1e3:>5.0f} ms"
            )
        naru, turns = (by_strategy[strategy] for strategy in STRATEGIES)
        summary[kind] = {
            "distance_to_oracle": naru["oracle_hit_ratio"] - naru["hit_ratio"],
            "ttft_vs_round_robin": turns["ttft_mean_s"] / naru["ttft_mean_s"],
        }
    for kind, it in summary.items():
        is_near = it["distance_to_oracle"] <= MAX_DISTANCE
        is_fast = it["ttft_vs_round_robin"] >= MIN_SPEEDUP
        print(
            f"{kind}: {it['distance_to_oracle'] * 100:.1f} points below the oracle ({'ok' if is_near else 'MISSED'}, "
            f"at most {MAX_DISTANCE * 100:.0f}), mean TTFT {it['ttft_vs_round_robin']:.2f} x lower than in turn "
            f"({'ok' if is_fast else 'MISSED'}, at least {MIN_SPEEDUP})"
        )
    return summary


def main(arguments: list[str]) -> int:
    """Runs all of it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.affinity", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the traffic")
    parser.add_argument("--quick", action="store_true", help="a fifth of the traffic; nothing is written")
    options = parser.parse_args(arguments)
    size = 1 if options.quick else 5
    traffic = {
        "multi-turn": multi_turn(4 * size, 8, options.seed),
        "shared prefix": shared_prefix(6, 16 * size, 500, options.seed),
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for kind, sessions in traffic.items():
            for strategy in STRATEGIES:
                print(f"{kind}, {strategy} ...", file=sys.stderr)
                results.setdefault(kind, {})[strategy] = run(sessions, strategy)
    except InstanceError as exc:
        print(exc, file=sys.stderr)
        return 1
    summary = report(results)
    if not options.quick:
        data = {"seed": options.seed, "machine": dataclasses.asdict(machine.describe()), **summary, "runs": results}
        RESULTS.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
