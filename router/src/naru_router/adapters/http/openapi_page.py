"""GET /openapi.json: the description of this API."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from naru_router.adapters.http.page_replies import JSON
from naru_router.core.openapi.document import document


class OpenApiPage:
    """Made when it is first asked for: it is the same for as long as the process lives."""

    def __init__(self) -> None:
        self._body = b""

    def routes(self) -> list[Route]:
        """The page."""
        return [Route("/openapi.json", self.description)]

    async def description(self, request: Request) -> Response:
        """GET /openapi.json. Nothing in it depends on the caller."""
        if not self._body:
            self._body = orjson.dumps(document())
        return Response(self._body, media_type=JSON)
