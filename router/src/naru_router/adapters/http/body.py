"""Reads a request's body within its limit, and notices when the client leaves. Used by the generation endpoints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine

from starlette.types import Receive, Scope

from naru_proto.errors import Cancelled, InvalidRequest


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: not declared as JSON, or larger than max_bytes; no more than that is ever held.
        Cancelled: the client left before it had sent everything.
    """
    headers: dict[bytes, bytes] = dict(scope["headers"])
    _check_content_type(headers.get(b"content-type", b"").decode("latin-1"))
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client left before it had sent the whole request")
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def run_while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs the work and cancels it when the client disconnects.

    Raises:
        Cancelled: the client left; the work has been cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client left before the answer was complete")
        task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(content_type: str) -> None:
    # Absent means that the client left it to us; a form or text would only fail later and less clearly.
    media_type, _, parameters = content_type.partition(";")
    media_type = media_type.strip().lower()
    is_json = media_type == "application/json" or re.fullmatch(r"application/[^/]+\+json", media_type)
    if content_type and not is_json:
        raise InvalidRequest(f"the content type is {content_type[:100]!r}; send application/json")
    charset = parameters.lower().partition("charset=")[2].partition(";")[0].strip(' "')
    if charset not in ("", "utf-8", "utf8"):
        raise InvalidRequest(f"the charset is {charset[:40]!r}; JSON is sent as utf-8")


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the body is larger than the limit of {max_bytes} bytes; send a shorter request")
