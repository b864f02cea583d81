"""The paths of the HTTP edge, request ids, and OpenAI's form for what no path answers.

The endpoints that models answer are called straight from the server; pages, which need no speed, through Starlette.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol
from urllib.parse import unquote_to_bytes

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from naru_proto.names import HEADER_REQUEST_ID
from naru_router.adapters.http.asgi import run_asgi
from naru_router.adapters.http.chat import ChatEndpoint
from naru_router.adapters.http.completions import CompletionEndpoint
from naru_router.adapters.http.generation import Edge
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.pages import Pages
from naru_router.adapters.http.responses import send_json
from naru_router.core.errors import openai_error

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
_HEADER = HEADER_REQUEST_ID.encode("ascii")


class Endpoint(Protocol):
    """Answers the requests of one path."""

    @property
    def methods(self) -> tuple[bytes, ...]:
        """That it takes."""

    async def serve(self, request: HttpRequest, reply: Reply) -> None:
        """Answers one request; cancelled when the client leaves."""


class Application:
    """Answers every request of the server."""

    def __init__(
        self,
        edge: Edge,
        pages: Pages,
        more_pages: Sequence[Route] = (),
        endpoints: Mapping[bytes, Endpoint] = MappingProxyType({}),
        patterns: Sequence[tuple[re.Pattern[bytes], Endpoint]] = (),
    ) -> None:
        """`endpoints`: further ones by their path. `patterns`: those whose path has parameters, as named groups."""
        self._endpoints: dict[bytes, Endpoint] = {
            b"/v1/chat/completions": ChatEndpoint(edge),
            b"/v1/completions": CompletionEndpoint(edge),
            **endpoints,
        }
        self._patterns = patterns
        routes = [
            Route("/v1/models", pages.models),
            Route("/v1/models/{model_id:path}", pages.model),
            Route("/health", pages.health),
            Route("/healthz", pages.health),
            Route("/ready", pages.ready),
            Route("/readyz", pages.readyz),
            Route("/metrics", pages.metrics),
            *more_pages,
        ]
        self._pages = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _crash})
        self._pages.router.redirect_slashes = False

    async def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Gives the request an id, the client's own where it is well formed, and has it answered."""
        given = request.header(_HEADER)
        if given is not None and _REQUEST_ID.fullmatch(given):
            request.request_id = given.decode("ascii")
        else:
            request.request_id = os.urandom(16).hex()
        reply.extra = b"%b: %b\r\n" % (_HEADER, request.request_id.encode("ascii"))
        endpoint = self._endpoints.get(request.target) or self._find(request)
        if endpoint is None:
            await run_asgi(self._pages, request, reply)
        elif request.method in endpoint.methods:
            await endpoint.serve(request, reply)
        else:
            text = f"{request.target.decode('latin-1')[:200]} does not take {request.method.decode('ascii')}"
            body = openai_error(text, "invalid_request_error", None, None)
            send_json(reply, 405, body, ((b"allow", b", ".join(endpoint.methods)),))

    def _find(self, request: HttpRequest) -> Endpoint | None:
        path = request.target.partition(b"?")[0]
        endpoint = self._endpoints.get(path)
        if endpoint is not None:
            return endpoint
        for pattern, matched in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                request.params = {
                    name: unquote_to_bytes(value).decode("utf-8", "replace")
                    for name, value in match.groupdict().items()
                    if value is not None
                }
                return matched
        return None


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)  # registered for it alone
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        message = f"there is nothing at {request.method} {request.url.path[:200]}; the API is under /v1"
    elif exc.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method}"
        headers["allow"] = ", ".join(_methods_of(request))
    else:
        message = str(exc.detail)
    body = openai_error(message, "invalid_request_error", None, None)
    return Response(body, exc.status_code, headers=headers, media_type="application/json")


def _methods_of(request: Request) -> list[str]:
    """All that its path takes: one of its routes alone would tell of its own."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


async def _crash(request: Request, exc: Exception) -> Response:
    body = openai_error("the router failed on this request; its log says why", "server_error", None, "internal_error")
    return Response(body, 500, media_type="application/json")
