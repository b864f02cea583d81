"""A router over loopback, stub workers, and the board between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import redis.asyncio
from stub_worker import Script, StubWorker, say

from naru_proto import names
from naru_proto.registry import ModelInfoRecord, ModelRecord, ResidentRecord, WorkerRecord
from naru_router.app import App, build
from naru_router.settings import Settings

MODEL = "tiny-a"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
LEASE_S = 1000.0


async def poll(condition: Callable[[], Awaitable[bool]], timeout_s: float = 20) -> None:
    """Asks again and again, for what tells nobody when it changes."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - another process has no event to give
            await asyncio.sleep(0.02)


def body(path: str, **fields: Any) -> dict[str, Any]:
    """The smallest body of an endpoint, and more fields."""
    prompt = {"prompt": "hi"} if path == COMPLETION else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": MODEL, **prompt, **fields}


def events(data: bytes) -> list[Any]:
    """The events of a whole stream; the end mark is the string [DONE]."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


def info(template: str = CHATML, max_model_len: int = 2048) -> ModelInfoRecord:
    return ModelInfoRecord("llama", max_model_len, 49152, template, "<s>", "</s>")


class Rig:
    """One board, at most one router, any number of workers."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self.board = redis.asyncio.Redis.from_url(redis_url)
        self.workers: dict[str, StubWorker] = {}
        self.app: App
        self.client: httpx.AsyncClient
        self._has_router = False

    async def publish_model(self, name: str = MODEL, **fields: Any) -> None:
        record = ModelRecord(name=name, uri="file:///nowhere", generation=1, created_s=1700000000, **fields)
        await self.board.hset(names.KEY_MODELS, name, record.to_json())
        await self.board.publish(names.CHANNEL_CHANGES, "models")

    async def publish_worker(
        self,
        worker_id: str,
        *,
        models: tuple[str, ...] = (MODEL,),
        state: str = "ready",
        facts: ModelInfoRecord | None = None,
        lease_s: float = LEASE_S,
        epoch: str = "e1",
        draining: bool = False,
        leaving: bool = False,
        error: str = "",
        generation: int = 1,
        eta_s: float = 0.0,
        pool: str = "default",
        num_known: int = 0,
    ) -> None:
        facts = facts or info()
        digest = facts.digest() if state == "ready" else ""
        await self.board.set(names.key_model_info(facts.digest()), facts.to_json())
        resident = ResidentRecord(state, generation, digest, error=error, eta_s=eta_s)
        port = self.workers[worker_id].port if worker_id in self.workers else 1
        held = {name: resident for name in models}
        address = f"127.0.0.1:{port}"
        record = WorkerRecord(
            worker_id, address, epoch, held, draining=draining, leaving=leaving, pool=pool, num_known=num_known
        )
        await self.board.sadd(names.KEY_WORKERS, worker_id)
        await self.board.set(names.key_worker(worker_id), record.to_json(), px=int(lease_s * 1000))
        await self.board.publish(names.CHANNEL_CHANGES, f"worker:{worker_id}")

    async def start_worker(self, worker_id: str = "w0", script: Script | None = None, **fields: Any) -> StubWorker:
        """A running stub worker with a lease."""
        worker = StubWorker(worker_id, script or say("Hel", "lo"))
        await worker.start()
        self.workers[worker_id] = worker
        await self.publish_worker(worker_id, **fields)
        return worker

    async def start_router(self, *, wait_for: int | None = None, **settings: Any) -> App:
        """A running router that is connected to all workers published so far."""
        defaults: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "redis_url": self.redis_url, "model_wait_s": 5.0}
        defaults["template_timeout_s"] = 30.0  # the machine may be busy; the template's own limits are tested apart
        self.app = build(Settings(**{**defaults, **settings}))
        self._has_router = True
        await self.app.start()
        headers = {names.HEADER_EXPLAIN: "1"}  # many tests ask where a request went
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.app.http_port}", timeout=20, headers=headers)
        num_up = len(self.workers) if wait_for is None else wait_for
        await self.until(lambda: self.app.registry.status.has_map and self.app.fleet.num_up() >= num_up)
        return self.app

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        """Waits for a change of the map or of a link that makes it true."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self.app.fleet.changed(0.05)

    async def post(self, path: str, json_body: object) -> httpx.Response:
        return await self.client.post(path, json=json_body)

    async def stream(self, path: str, json_body: dict[str, Any]) -> list[Any]:
        """The events of a stream that must begin well."""
        response = await self.client.post(path, json={**json_body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)

    async def close(self) -> None:
        if self._has_router:
            await self.client.aclose()
            await self.app.stop()
        for worker in self.workers.values():
            await worker.kill()
        await self.board.aclose()


async def simple(rig: Rig, script: Script | None = None, **settings: Any) -> StubWorker:
    """One model, one worker, one router."""
    await rig.publish_model()
    worker = await rig.start_worker(script=script)
    await rig.start_router(**settings)
    return worker
