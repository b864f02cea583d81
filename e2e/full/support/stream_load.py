"""Continuous streams against a router, and what became of each: the load under which cluster stories are told.

Runs in a thread of its own, so that a test may call kubectl and helm meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

PROMPT = "Name the capital of France."
_CONNECT = httpx.Timeout(10.0, read=120.0)


@dataclass(frozen=True)
class Outcome:
    """One stream's end."""

    text: str
    finish_reason: str | None
    error: str
    """Empty: it ended as it should."""
    started_s: float
    ended_s: float


@dataclass
class StreamLoad:
    """Many clients, each with one stream after another."""

    url: str
    model: str
    num_clients: int = 16
    max_tokens: int = 64
    outcomes: list[Outcome] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def failures(self, expected: str) -> list[Outcome]:
        """Streams that ended with an error, were cut, or said something else than an undisturbed one."""
        return [o for o in self.outcomes if o.error or o.finish_reason != "length" or o.text != expected]

    def wait_for(self, count: int, timeout_s: float = 120.0) -> None:
        """Returns when so many more streams have ended."""
        target, deadline_s = len(self.outcomes) + count, time.monotonic() + timeout_s
        while len(self.outcomes) < target:
            assert time.monotonic() < deadline_s, f"{len(self.outcomes)} of {target} streams ended in {timeout_s} s"
            time.sleep(0.05)

    @contextmanager
    def running(self) -> Iterator[StreamLoad]:
        """The load goes on inside; leaving waits until every stream has ended by itself."""
        thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="streams")
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.num_clients)
        async with httpx.AsyncClient(timeout=_CONNECT, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self.num_clients)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._is_over.is_set():
            outcome = await one_stream(http, self.url, self.model, self.max_tokens)
            self.outcomes.append(outcome)
            if outcome.error:
                await asyncio.sleep(0.2)  # a router that is away must not be asked a thousand times


async def one_stream(http: httpx.AsyncClient, url: str, model: str, max_tokens: int) -> Outcome:
    """One greedy answer of a fixed length, streamed."""
    started_s, pieces, finish_reason, error = time.time(), [], None, ""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                text = (await reply.aread()).decode("utf-8", "replace")
                return Outcome("", None, f"HTTP {reply.status_code}: {text[:300]}", started_s, time.time())
            is_done = False
            async for event in _events(reply):
                if event == "[DONE]":
                    is_done = True
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    error = str(chunk["error"].get("message"))
                    continue
                for choice in chunk["choices"]:
                    pieces.append(choice["delta"].get("content") or "")
                    finish_reason = choice["finish_reason"] or finish_reason
            if not is_done and not error:
                error = "the stream ended without [DONE]"
    except httpx.HTTPError as exc:
        error = f"{type(exc).__name__}: {exc}"
    return Outcome("".join(pieces), finish_reason, error, started_s, time.time())


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def reference_text(url: str, model: str, max_tokens: int = 64) -> str:
    """What an undisturbed stream says."""

    async def ask() -> Outcome:
        async with httpx.AsyncClient(timeout=_CONNECT, trust_env=False) as http:
            return await one_stream(http, url, model, max_tokens)

    outcomes: list[Outcome] = []
    # In a thread: pytest's own event loop stays as it is.
    thread = threading.Thread(target=lambda: outcomes.append(asyncio.run(ask())), name="reference")
    thread.start()
    thread.join()
    (outcome,) = outcomes
    assert not outcome.error, outcome
    assert outcome.finish_reason == "length", outcome
    return outcome.text
