"""The least that Python needs to carry chats from one HTTP server to another: uvicorn before aiohttp.

A row to compare with: `python -m bench.router.passthrough PORT BACKEND_PORT`. Checks nothing and knows no models.
"""

from __future__ import annotations

import sys

import aiohttp
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send


def build(backend_port: int) -> ASGIApp:
    """The application."""
    url = f"http://127.0.0.1:{backend_port}"
    sessions: list[aiohttp.ClientSession] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if not sessions:
            connector = aiohttp.TCPConnector(limit=0)
            sessions.append(aiohttp.ClientSession(connector=connector))
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {"content-type": "application/json"}
        async with sessions[0].post(url + scope["path"], data=data, headers=headers) as reply:
            kind = reply.headers["content-type"].encode()
            start = {"type": "http.response.start", "status": reply.status, "headers": [(b"content-type", kind)]}
            await send(start)
            async for chunk in reply.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    return application


if __name__ == "__main__":
    uvicorn.run(build(int(sys.argv[2])), port=int(sys.argv[1]), lifespan="off", log_level="error", http="httptools")
