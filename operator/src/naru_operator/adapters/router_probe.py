"""One question to a router that may not listen yet: which models does it know. Called while `naru up` starts.

Readiness tells it without an API key.

Sockets and JSON only: an HTTP client would cost more start time than the whole wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20


async def listed_models(host: str, port: int) -> set[str] | None:
    """Names that a router knows by ``/readyz``; None while it does not answer that with 200."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, _, body = (await _get(host, port, "/readyz")).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            return None
        return {str(name) for name in json.loads(body)["models"].keys()}
    except (OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
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
