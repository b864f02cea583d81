"""A worker is killed under load: every answer ends whole, as if nothing had happened, and the worker comes back."""

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

    worker_id: str = ""
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    is_ended: bool = False
    first_text: threading.Event = field(default_factory=threading.Event)

    def take(self, event: dict[str, Any] | None) -> None:
        if event is None:
            self.is_ended = True
            return
        if "error" in event:
            self.errors.append(event["error"])
            return
        for choice in event["choices"]:
            self.texts.append(choice["delta"].get("content") or "")
            self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if any(self.texts):
            self.first_text.set()


def question(index: int, max_tokens: int) -> dict[str, Any]:
    return chat_body(f"Tell me story number {index} about a ferry.", max_tokens=max_tokens)


def ask(naru: RunningNaru, body: dict[str, Any], outcome: Outcome) -> None:
    with (
        httpx.Client(base_url=naru.url, timeout=DEADLINE_S, trust_env=False) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}, headers={"x-naru-explain": "1"}
        ) as stream,
    ):
        if stream.status_code != 200:
            outcome.errors.append(stream.read())
            return
        outcome.worker_id = stream.headers["x-naru-route"].partition(";")[0]
        for event in stream_events(stream.iter_lines()):
            outcome.take(event)


def begin(naru: RunningNaru, bodies: list[dict[str, Any]]) -> tuple[list[Outcome], list[threading.Thread]]:
    """Streams under way."""
    outcomes = [Outcome() for _ in bodies]
    threads = [
        threading.Thread(target=ask, args=(naru, body, outcome), daemon=True)
        for body, outcome in zip(bodies, outcomes, strict=True)
    ]
    for thread in threads:
        thread.start()
    return outcomes, threads


def check_whole(
    naru: RunningNaru, bodies: list[dict[str, Any]], outcomes: list[Outcome], threads: list[threading.Thread]
) -> None:
    """All streams end, with the text that an undisturbed request has."""
    deadline_s = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    for body, outcome in zip(bodies, outcomes, strict=True):
        assert not outcome.errors and outcome.is_ended and len(outcome.finish_reasons) == 1, outcome
        (choice,) = naru.http.post("/v1/chat/completions", json=body).json()["choices"]
        assert "".join(outcome.texts) == choice["message"]["content"]
        assert outcome.finish_reasons == [choice["finish_reason"]]


def num_continued(naru: RunningNaru) -> float:
    lines = naru.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("naru_router_continued_requests_total"))


def num_connected(naru: RunningNaru) -> int:
    return int(naru.http.get("/readyz").json()["workers"]["connected"])


def both_ready(naru: RunningNaru) -> bool:
    leases = naru.leases().values()
    return [lease["models"].get("smollm2", {}).get("state") for lease in leases] == ["ready", "ready"]


def test_answers_of_a_killed_worker_end_whole_on_the_other_one(naru: RunningNaru) -> None:
    eventually(lambda: both_ready(naru), 60, "two workers with the model")
    killed = naru.worker("default-0")
    bodies = [question(index, 48) for index in range(NUM_REQUESTS)]
    outcomes, threads = begin(naru, bodies)
    for outcome in outcomes:
        assert outcome.first_text.wait(DEADLINE_S)
    killed.kill()
    check_whole(naru, bodies, outcomes, threads)
    assert num_continued(naru) > 0

    naru.wait_for_line("default-0 was ended by SIGKILL", 10)
    eventually(lambda: both_ready(naru), 45, "the worker is back with its model")
    assert naru.worker("default-0").pid != killed.pid


def test_an_answer_waits_for_a_worker_to_come_back_when_all_are_killed(naru: RunningNaru) -> None:
    eventually(lambda: both_ready(naru), 60, "two workers with the model")
    before = num_continued(naru)
    bodies = [question(100, 200)]
    outcomes, threads = begin(naru, bodies)
    assert outcomes[0].first_text.wait(DEADLINE_S)
    # First the idle one: whoever loses two workers in one moment has used up what it may lose.
    killed = outcomes[0].worker_id
    other = "default-1" if killed == "default-0" else "default-0"
    naru.worker(other).kill()
    eventually(lambda: num_connected(naru) == 1, 5, "the other one is gone")
    naru.worker(killed).kill()
    eventually(lambda: num_connected(naru) == 0, 5, "both are gone")
    # Nobody has the model, nobody even has a lease: who asks now waits as well.
    late = naru.http.post("/v1/chat/completions", json=chat_body("Name the capital of France.", max_tokens=24))
    assert "Paris" in late.json()["choices"][0]["message"]["content"]
    check_whole(naru, bodies, outcomes, threads)
    assert num_continued(naru) > before
