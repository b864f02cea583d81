"""Batches as a client makes and reads them, and a stub worker's answers that can be held back."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from router_rig import MODEL, Rig, poll
from stub_worker import STOP, Script, say, usage

from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters.storage.file_shelf import FileShelf
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.batches.record import ACTIVE_KIND, KIND, new_batch, read_batch

CHAT = "/v1/chat/completions"
BATCHES = "/v1/batches"
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:
    filled = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": filled})


def lines(count: int) -> str:
    return "\n".join(line(f"line-{i}") for i in range(count)) + "\n"


async def begin(rig: Rig, content: str, endpoint: str = CHAT, **fields: Any) -> str:
    """The id of a new batch over a file of this content."""
    made = await rig.client.post("/v1/files", files={"file": content.encode()}, data={"purpose": "batch"})
    asked = {"input_file_id": made.json()["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
    response = await rig.client.post(BATCHES, json=asked)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def look(rig: Rig, batch_id: str) -> dict[str, Any]:
    reply = await rig.client.get(f"{BATCHES}/{batch_id}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def ended(rig: Rig, batch_id: str, timeout_s: float = 30) -> dict[str, Any]:
    """The batch once it is over."""

    async def is_over() -> bool:
        return (await look(rig, batch_id))["status"] in OVER

    await poll(is_over, timeout_s)
    return await look(rig, batch_id)


async def read(rig: Rig, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = (await rig.client.get(f"/v1/files/{file_id}/content")).text
    assert content.endswith("\n")
    return [json.loads(each) for each in content.splitlines()]


async def serve(rig: Rig, folder: Path, script: Script | None = None, **settings: Any) -> None:
    await rig.publish_model()
    await rig.start_worker(script=script or say("Hel", "lo"))
    await rig.start_router(files_dir=str(folder), **settings)


def asked_of(rig: Rig) -> Counter[str]:
    """How often workers were asked each line."""
    texts = [request.text for worker in rig.workers.values() for request in worker.requests]
    return Counter(text.split("user\n")[1].split("<")[0] for text in texts)


class Tap:
    """A script that answers `free` requests and holds the others until it is opened."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.opened = asyncio.Event()

    async def script(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        self.free -= 1
        if self.free < 0:
            await self.opened.wait()
        yield wire.Delta(text="ok", num_tokens=1, finish_reason=STOP, usage=usage(), request_done=True)


async def counted(rig: Rig, batch_id: str, completed: int) -> None:
    async def has_come() -> bool:
        return bool((await look(rig, batch_id))["request_counts"]["completed"] >= completed)

    await poll(has_come)


async def put_batch(store: RecordStore, batch_id: str, content: str, tenant: str = "") -> None:
    """A batch as the endpoints make one, where no router is to be asked."""
    shelf = FileShelf(store)
    file_id, writer = await shelf.begin(tenant)
    await writer.write(content.encode())
    await shelf.finish(tenant, file_id, writer, name="x", purpose="batch")
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    record = new_batch(batch_id, read_batch(asked, (CHAT,)), tenant, int(time.time()))
    await store.put(KIND, tenant, batch_id, record)
    await store.put(ACTIVE_KIND, tenant, batch_id, {"tenant": tenant})
