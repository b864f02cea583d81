"""The routes of the HTTP edge, request ids, and OpenAI's form for what no route answers."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from naru_proto.names import HEADER_REQUEST_ID
from naru_router.adapters.gate import Gate
from naru_router.adapters.http.chat import ChatEndpoint
from naru_router.adapters.http.completions import CompletionEndpoint
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.pages import Pages
from naru_router.core.errors import openai_error

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_HEADER = HEADER_REQUEST_ID.encode("ascii")


def build_application(edge: Edge, pages: Pages) -> ASGIApp:
    """The ASGI application."""
    routes = [
        Route("/v1/chat/completions", ChatEndpoint(edge), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(edge), methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{model_id:path}", pages.model),
        Route("/health", pages.health),
        Route("/healthz", pages.health),
        Route("/ready", pages.ready),
        Route("/readyz", pages.readyz),
        Route("/metrics", pages.metrics),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _crash})
    app.router.redirect_slashes = False  # a redirected POST would lose its body in many clients
    return Replies(app, edge.gate)


class Replies:
    """Gives each request an id, the client's own where it is well formed, and returns it.

    While the router leaves, a reply is the last one of its connection: the client opens the next one elsewhere.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        scope["naru.request_id"] = request_id.decode("ascii")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (_HEADER, request_id)]
                if self._gate.is_leaving and all(name != b"connection" for name, _ in headers):
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)  # registered for it alone
    if exc.status_code == 404:
        message = f"there is nothing at {request.method} {request.url.path[:200]}; the API is under /v1"
    elif exc.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method}"
    else:
        message = str(exc.detail)
    body = openai_error(message, "invalid_request_error", None, None)
    return Response(body, exc.status_code, headers=dict(exc.headers or {}), media_type="application/json")


async def _crash(request: Request, exc: Exception) -> Response:
    body = openai_error("the router failed on this request; its log says why", "server_error", None, "internal_error")
    return Response(body, 500, media_type="application/json")
