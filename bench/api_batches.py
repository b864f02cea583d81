"""A batch of chats beside 64 live streams of the same kind of chats, on one router and one worker.

Run by `make bench-api`, or alone: `python -m bench.api_batches`. Rounds alternate, each with chats of its own, so that
no cache helps. Both sides ask for the same tokens. A batch counts from its making to its end, checks and files too.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from bench.engines import Setup, find_model, naru_specs
from bench.machine import describe
from bench.measure import wait_until_serving
from bench.servers import Server

NUM_STREAMS = 64
NUM_CHATS = 448
MAX_TOKENS = 24
NUM_ROUNDS = 3
WORDS = "river stone garden winter letter window market bridge forest candle harbor silver".split()
CHATS = "/v1/chat/completions"


def chats(model: str, round_number: int) -> list[dict[str, Any]]:
    """Bodies of chats that share no beginning with any other round's."""
    found = []
    for i in range(NUM_CHATS):
        words = " ".join(WORDS[(i * 7 + round_number * 5 + j * j) % len(WORDS)] for j in range(24))
        text = f"{round_number}-{i}: tell a story with these words: {words}"
        messages = [{"role": "system", "content": f"Story {round_number}-{i}."}, {"role": "user", "content": text}]
        found.append(
            {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
        )
    return found


async def live_tokens_per_s(port: int, bodies: list[dict[str, Any]]) -> float:
    """Of 64 clients that each have one stream open after another."""
    waiting = iter(bodies)
    started_s = time.perf_counter()
    await asyncio.gather(*(_client(port, waiting) for _ in range(NUM_STREAMS)))
    return len(bodies) * MAX_TOKENS / (time.perf_counter() - started_s)


async def _client(port: int, waiting: Iterator[dict[str, Any]]) -> None:
    # As cheap as a client can be: its processor time is the server's loss.
    for body in waiting:
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {CHATS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
        writer.write(head.encode() + payload)
        data = await reader.read()
        writer.close()
        if b"[DONE]" not in data or b'"completion_tokens":%d' % MAX_TOKENS not in data:
            raise RuntimeError(f"a live stream went wrong: {data[-300:]!r}")


def batch_tokens_per_s(client: httpx.Client, bodies: list[dict[str, Any]]) -> float:
    """Of a batch, from its making to its end."""
    rows = [
        json.dumps({"custom_id": f"{i}", "method": "POST", "url": CHATS, "body": body}) for i, body in enumerate(bodies)
    ]
    file = client.post("/v1/files", files={"file": "\n".join(rows).encode()}, data={"purpose": "batch"}).json()
    started_s = time.perf_counter()
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    seconds = time.perf_counter() - started_s
    if batch["request_counts"] != {"total": len(bodies), "completed": len(bodies), "failed": 0}:
        raise RuntimeError(f"the batch went wrong: {batch}")
    lines = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    num_tokens = sum(json.loads(each)["response"]["body"]["usage"]["completion_tokens"] for each in lines)
    return float(num_tokens) / seconds


def run() -> dict[str, Any]:
    """Measures; `batch_vs_live_ratio` and the medians behind it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (spec,) = naru_specs(Setup(find_model(None), describe().num_cores, work, work))
        spec = replace(spec, environment={**spec.environment, "NARU_ROUTER_FILES_DIR": str(work / "files")})
        live, batch = [], []
        with Server(spec, work / "naru.log") as server:
            wait_until_serving(server, 120.0)
            with httpx.Client(base_url=f"http://127.0.0.1:{spec.port}", timeout=600) as client:
                asyncio.run(live_tokens_per_s(spec.port, chats(spec.model, 0)[:NUM_STREAMS]))  # warm
                for number in range(1, NUM_ROUNDS + 1):
                    if number % 2:
                        live.append(asyncio.run(live_tokens_per_s(spec.port, chats(spec.model, 2 * number))))
                    batch.append(batch_tokens_per_s(client, chats(spec.model, 2 * number + 1)))
                    if not number % 2:  # so that a machine that gets slower slows both sides
                        live.append(asyncio.run(live_tokens_per_s(spec.port, chats(spec.model, 2 * number))))
                    print(f"   round {number}: live {live[-1]:7.1f}   batch {batch[-1]:7.1f} tokens/s", flush=True)
    medians = statistics.median(live), statistics.median(batch)
    print(f"   {NUM_CHATS} chats of {MAX_TOKENS} tokens, {NUM_STREAMS} live streams")
    print(f"   {'':16}{'tokens/s':>10}\n   {'live streams':16}{medians[0]:10.1f}\n   {'batch':16}{medians[1]:10.1f}")
    details = {"live_tokens_per_s": live, "batch_tokens_per_s": batch, "num_chats": NUM_CHATS, "max_tokens": MAX_TOKENS}
    return {"batch_vs_live_ratio": medians[1] / medians[0], "batches": details}


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
    sys.exit(0)
