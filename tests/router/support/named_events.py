"""Streams whose events have names: those of the Responses and of the Messages API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from router_rig import Rig
from stub_worker import StubWorker

from naru_proto.v1 import worker_pb2 as wire


def read_events(data: bytes) -> list[dict[str, Any]]:
    """The data of all events, each of which has its own type for a name."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, line = part.split("\n")
        assert name.startswith("event: ")
        assert line.startswith("data: ")
        found.append(json.loads(line[6:]))
        assert found[-1]["type"] == name[7:]
    return found


def types(events: list[dict[str, Any]]) -> list[str]:
    """Types of the events, the same ones in a row told once."""
    names = [event["type"] for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


async def stream(rig: Rig, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The events of a stream that must begin well."""
    response = await rig.client.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.content)


async def broken_stream(
    rig: Rig, worker: StubWorker, path: str, body: dict[str, Any], *texts: str, **headers: str
) -> list[dict[str, Any]]:
    """The events of a stream whose worker says the texts and, once the client has seen them begin, that it failed."""
    has_begun = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        for text in texts:
            yield wire.Delta(text=text, num_tokens=1)
        await has_begun.wait()
        yield wire.Delta(error=wire.Error(code="internal_error", message="it broke"), request_done=True)

    worker.script = script
    seen = b""
    async with rig.client.stream("POST", path, json={**body, "stream": True}, headers=headers) as response:
        async for data in response.aiter_raw():
            seen += data
            has_begun.set()
    assert response.status_code == 200
    return read_events(seen)
