"""One question to a router that may not listen yet: which models does it list. Called while `naru up` starts.

Sockets and JSON only: an HTTP client would cost more start time than the whole wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20


async def listed_models(host: str, port: int) -> set[str] | None:
    """Names in ``/v1/models``; None while the router does not answer it with 200."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, _, body = (await _get(host, port, "/v1/models")).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            return None
        return {str(card["id"]) for card in json.loads(body)["data"]}
    except (OSError, TimeoutError, ValueError, KeyError, TypeError):
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
