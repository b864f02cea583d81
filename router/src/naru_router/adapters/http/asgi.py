"""Runs an ASGI application on this server's requests: for pages that need no speed. No lifespan, no WebSockets."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message

from naru_router.adapters.http.messages import HttpRequest, Reply


async def run_asgi(application: ASGIApp, request: HttpRequest, reply: Reply) -> None:
    """Answers one request. The whole body is one message; the task is cancelled when the client leaves."""
    path, _, query = request.target.partition(b"?")
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method.decode("ascii"),
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
        "naru.request": request,
        "naru.request_id": request.request_id,
    }
    begin: Message = {}
    has_given_body = False

    async def receive() -> Message:
        nonlocal has_given_body
        if has_given_body:
            return {"type": "http.disconnect"}
        has_given_body = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal begin
        if message["type"] == "http.response.start":
            begin = message
            return
        headers = [(name, value) for name, value in begin["headers"] if name not in (b"content-length", b"connection")]
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if not reply.has_started and is_last:
            reply.send(begin["status"], headers, body)
            return
        if not reply.has_started:
            reply.begin(begin["status"], headers)
        if body:
            reply.write(body)
        if is_last:
            reply.end()

    await application(scope, receive, send)
