"""Questions to a router that may not listen yet: which models does it know, what can they do. Asked by `naru up`.

Readiness tells it without an API key.

Sockets and JSON only: an HTTP client would cost more start time than the whole wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20


async def listed_models(host: str, port: int) -> set[str] | None:
    """Names that a router knows by ``/readyz``; None while it does not answer that with 200."""
    try:
        detail = await _detail(host, port)
        return None if detail is None else {str(name) for name in detail["models"].keys()}
    except (KeyError, TypeError, AttributeError):
        return None


async def tasks_of_models(host: str, port: int) -> dict[str, list[str]]:
    """What models that a router knows can be asked for, by name; those of which it is not known are left out."""
    try:
        detail = await _detail(host, port) or {"tasks": {}}
        return {str(name): [str(task) for task in tasks] for name, tasks in detail["tasks"].items()}
    except (KeyError, TypeError, AttributeError):
        return {}


async def _detail(host: str, port: int) -> Any:
    """What it tells of itself; None while it does not answer that with 200."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, _, body = (await _get(host, port, "/readyz")).partition(b"\r\n\r\n")
        return json.loads(body) if b" 200 " in head.split(b"\r\n", 1)[0] else None
    except (OSError, TimeoutError, ValueError):
        return None


async def _get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: the answer ends with the connection and is never chunked.
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        await writer.drain()
        answer = bytearray()
        while (chunk := await reader.read(65536)) and len(answer) < _MAX_BYTES:
            answer += chunk
        return bytes(answer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
