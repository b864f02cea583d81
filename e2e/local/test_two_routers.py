"""Two routers in front of two workers: they agree, and whichever part is lost, who asks gets the whole answer."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from running_naru import RunningNaru, chat_body, eventually, small_model, stream_events

from naru_proto import names

pytestmark = pytest.mark.smollm2
STEADY = small_model("replicas: {min: 2}")
COLD = small_model("residency: {policy: OnDemand}", "queue: {maxWait: 60s, maxDepth: 1000}")
NUM_CLIENTS = 6
NUM_QUESTIONS = 8
ANSWER_TIMEOUT_S = 60.0
REDIS_AWAY_S = 20.0


def start(manifest: str, folder: Path) -> RunningNaru:
    path = folder / "models.yaml"
    path.write_text(manifest)
    return RunningNaru(["--routers", "2", str(path)], folder / "home")


def urls_of(naru: RunningNaru) -> tuple[str, str]:
    more = next(line for line in naru.output if line.startswith("more routers: "))
    return naru.url, more.split()[-1]


@pytest.fixture
def steady(tmp_path: Path) -> Iterator[RunningNaru]:
    with start(STEADY, tmp_path) as naru:
        yield naru


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[RunningNaru]:
    with start(COLD, tmp_path) as naru:
        yield naru


def body(index: int) -> dict[str, Any]:
    return chat_body(f"Tell me story number {index % NUM_QUESTIONS} about a ferry.", max_tokens=24)


def ask(client: httpx.Client, url: str, index: int) -> str:
    """The streamed answer; fails on any error that is told."""
    texts: list[str] = []
    with client.stream("POST", f"{url}/v1/chat/completions", json={**body(index), "stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        is_ended = False
        for event in stream_events(stream.iter_lines()):
            is_ended = event is None
            if event is not None:
                assert "error" not in event, event
                texts += [choice["delta"].get("content") or "" for choice in event["choices"]]
    assert is_ended, "the stream was cut without a word"
    return "".join(texts)


@dataclass
class Load:
    """Clients that ask both routers in turn, and the other one where a connection breaks, as clients do."""

    urls: tuple[str, str]
    expected: dict[int, str]
    num_answers: dict[str, int] = field(default_factory=dict)
    num_broken: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(NUM_CLIENTS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(ANSWER_TIMEOUT_S)

    def counts(self) -> dict[str, int]:
        with self.lock:
            return dict(self.num_answers)

    def _work(self, number: int) -> None:
        index = number
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            while not self.stopping.is_set():
                index += NUM_CLIENTS
                try:
                    self._answer(client, index)
                except Exception as exc:
                    with self.lock:
                        self.problems.append(f"{type(exc).__name__}: {exc}")

    def _answer(self, client: httpx.Client, index: int) -> None:
        began_s = time.monotonic()
        url = self.urls[index // NUM_CLIENTS % 2]
        while True:
            try:
                text = ask(client, url, index)
                break
            except httpx.TransportError:
                with self.lock:
                    self.num_broken[url] = self.num_broken.get(url, 0) + 1
                if time.monotonic() - began_s > ANSWER_TIMEOUT_S:
                    raise
                url = self.urls[1 - self.urls.index(url)]
        assert text == self.expected[index % NUM_QUESTIONS]
        with self.lock:
            self.num_answers[url] = self.num_answers.get(url, 0) + 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)


def ready_workers(naru: RunningNaru) -> int:
    states = [lease["models"].get("smollm2", {}).get("state") for lease in naru.leases().values()]
    return states.count("ready")


def child(naru: RunningNaru, *words: str) -> psutil.Process:
    (found,) = (each for each in naru.children() if all(any(w in part for part in each.cmdline()) for w in words))
    return found


def router_at(naru: RunningNaru, url: str) -> psutil.Process:
    return child(naru, "naru_router", url.rpartition(":")[2])


def open_requests(url: str) -> dict[str, float]:
    """Requests that a router counts as open on workers: its own and the others'."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r"^(naru_router_(?:requests|others)_in_flight)\{worker=\"([^\"]+)\"\} (\S+)$", text, re.M)
    return {f"{name} {worker}": float(value) for name, worker, value in found}


def is_idle(url: str) -> bool:
    return not any(open_requests(url).values())


def further_answers(load: Load, count: int, what: str) -> None:
    """Both routers go on answering."""
    before = load.counts()
    eventually(
        lambda: all(load.counts().get(url, 0) >= before.get(url, 0) + count for url in load.urls),
        ANSWER_TIMEOUT_S,
        what,
    )


def test_no_answer_is_lost_or_changed_while_worker_router_and_redis_go_away(steady: RunningNaru) -> None:
    urls = urls_of(steady)
    eventually(lambda: ready_workers(steady) == 2, 60, "two workers with the model")
    with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
        expected = {index: ask(client, urls[0], index) for index in range(NUM_QUESTIONS)}
    with Load(urls, expected) as load:
        further_answers(load, 2, "answers of both routers")
        steady.worker("default-0").kill()
        further_answers(load, 2, "answers without a worker")
        eventually(lambda: ready_workers(steady) == 2, 60, "the worker is back")
        assert not load.num_broken, "a killed worker breaks no connection to a router"

        router_at(steady, urls[1]).kill()
        steady.wait_for_line("router#2 was ended by SIGKILL", 10)
        further_answers(load, 2, "answers of both routers, one of them started anew")
        assert set(load.num_broken) == {urls[1]}

        stopped = child(steady, "redis-server")
        stopped.suspend()
        try:
            began_s = time.monotonic()
            further_answers(load, 4, "answers without Redis")
            for url in urls:
                detail = eventually(functools.partial(away, url), 10, "the router says that Redis is away")
                assert detail["status"] == "ready"
            stopping = threading.Event()
            stopping.wait(max(0.0, began_s + REDIS_AWAY_S - time.monotonic()))
            further_answers(load, 1, "answers at the end of the outage")
        finally:
            stopped.resume()
        eventually(lambda: not any(away(url) for url in urls), 10, "Redis is back")
        further_answers(load, 2, "answers after the outage")
    assert not any(thread.is_alive() for thread in load.threads), "a request hangs"
    assert not load.problems
    for url in urls:
        eventually(functools.partial(is_idle, url), 2, "no request is counted that has ended")


def away(url: str) -> dict[str, Any] | None:
    """A router's detail while it cannot read the route map."""
    detail: dict[str, Any] = httpx.get(f"{url}/readyz", trust_env=False).json()
    return None if detail["registry"]["up"] else detail


def test_a_cold_model_is_loaded_once_for_200_first_requests_of_two_routers(cold: RunningNaru) -> None:
    urls = urls_of(cold)

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120.0, trust_env=False, limits=limits) as client:
            bodies = [chat_body("Name the capital of France.", max_tokens=4) for _ in range(200)]
            sent = (client.post(f"{urls[i % 2]}/v1/chat/completions", json=each) for i, each in enumerate(bodies))
            return list(await asyncio.gather(*sent))

    answers = asyncio.run(ask_all())
    assert [answer.status_code for answer in answers] == [200] * 200, {a.text for a in answers if a.status_code != 200}
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    with redis.Redis.from_url(cold.state()["redis_url"]) as board:
        events = [fields for _, fields in board.xrange(names.KEY_EVENTS)]
    loads = [fields for fields in events if fields[b"to"] == b"loading"]
    assert len(loads) == 1, events
