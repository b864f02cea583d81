"""A worker is killed under load: nothing hangs, nothing that could be served is lost, the worker comes back."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from running_naru import RunningNaru, chat_body, eventually, stream_events

NUM_REQUESTS = 16
DEADLINE_S = 45.0
pytestmark = pytest.mark.smollm2


@dataclass
class Outcome:
    """What one request saw."""

    num_events: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    status: int = 0

    def take(self, event: dict[str, Any] | None) -> None:
        if event is None:
            return
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.num_events += 1
        self.finish_reasons += [c["finish_reason"] for c in event["choices"] if c["finish_reason"]]


def ask(naru: RunningNaru, index: int, outcome: Outcome, first_event: threading.Event) -> None:
    body = chat_body(f"Tell me story number {index} about a ferry.", max_tokens=48, stream=True)
    with (
        httpx.Client(base_url=naru.url, timeout=DEADLINE_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as stream,
    ):
        outcome.status = stream.status_code
        if stream.status_code != 200:
            outcome.errors.append(stream.read())
            return
        for event in stream_events(stream.iter_lines()):
            outcome.take(event)
            first_event.set()


def test_kill_of_a_worker_under_load(naru: RunningNaru) -> None:
    eventually(lambda: len(naru.leases()) == 2, 30, "two workers")
    killed = naru.worker("default-0")
    epoch = naru.leases()["default-0"]["epoch"]
    outcomes = [Outcome() for _ in range(NUM_REQUESTS)]
    answering = threading.Event()
    threads = [
        threading.Thread(target=ask, args=(naru, index, outcome, answering), daemon=True)
        for index, outcome in enumerate(outcomes)
    ]
    for thread in threads:
        thread.start()
    assert answering.wait(DEADLINE_S)
    killed.kill()
    killed_s = time.monotonic()

    eventually(lambda: naru.leases().get("default-0", {}).get("epoch") != epoch, 5, "the old lease is gone")
    for thread in threads:
        thread.join(max(0.0, killed_s + DEADLINE_S - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a request hangs"

    for outcome in outcomes:
        has_failed = bool(outcome.errors)
        assert has_failed != bool(outcome.finish_reasons), outcome
        if has_failed:
            # Only what had begun to answer may fail; the rest was served elsewhere.
            assert outcome.status == 200, outcome
            assert outcome.num_events > 0, outcome
    assert any(outcome.finish_reasons for outcome in outcomes), outcomes

    naru.wait_for_line("default-0 was ended by SIGKILL", 10)
    eventually(
        lambda: naru.leases().get("default-0", {}).get("models", {}).get("smollm2", {}).get("state") == "ready",
        45,
        "the worker is back with its model",
    )
    assert naru.worker("default-0").pid != killed.pid
    reply = naru.http.post("/v1/chat/completions", json=chat_body("Name the capital of France.", max_tokens=24))
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
