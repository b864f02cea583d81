"""GET /v2/...: health, what the server is, and what is told of its models."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from naru_proto.errors import NaruError
from naru_router.adapters.http.page_replies import JSON, json_page
from naru_router.adapters.oip_repository import OipRepository
from naru_router.core.caller import Caller
from naru_router.core.errors import error_shape
from naru_router.core.oip.errors import OIP_ERRORS

EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters", "statistics")
_PATH = re.compile(r"/v2/models/(?P<name>.+?)(?:/versions/(?P<version>[^/]*))?(?:/(?P<what>ready|config|stats))?")
_FIXED = ("/v2", "/v2/health/live", "/v2/health/ready")
_READ = ("GET", "HEAD")
_METHODS = (*_READ, "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY")
_ALL = "stats"
"""In the place of a model's name: of all models."""


class OipPages:
    """Handlers that only read."""

    def __init__(self, repository: OipRepository, caller_of: Callable[[Callable[[str], str | None]], Caller]) -> None:
        self._repository = repository
        self._caller_of = caller_of

    def routes(self) -> list[Route]:
        """Where they are; the last one answers for what is not there."""
        return [
            Route("/v2", self.server),
            Route("/v2", self.nothing, methods=_METHODS),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/{path:path}", self.model),
            Route("/v2/{path:path}", self.nothing, methods=_METHODS),
        ]

    async def server(self, request: Request) -> Response:
        """GET /v2: what this server is."""
        return json_page(server_metadata())

    async def live(self, request: Request) -> Response:
        """GET /v2/health/live: the process answers."""
        return json_page({"live": True})

    async def ready(self, request: Request) -> Response:
        """GET /v2/health/ready: requests are taken."""
        is_ready = self._repository.is_serving
        return json_page({"ready": is_ready}, 200 if is_ready else 503)

    async def model(self, request: Request) -> Response:
        """GET /v2/models/{name}, and below it /versions/{version}, /ready, /config, /stats."""
        match = _PATH.fullmatch(request.scope["path"])
        if match is None:
            return await self.nothing(request)
        name, version, what = match["name"], match["version"] or "", match["what"]
        try:
            caller = self._caller_of(request.headers.get)
            if what == "ready":
                is_ready = self._repository.is_ready(name, version, caller)
                return json_page({"name": name, "ready": is_ready}, 200 if is_ready else 503)
            if what == "stats" or (what is None and name == _ALL):
                of = "" if what is None else name
                return json_page({"model_stats": self._repository.statistics(of, version, caller)})
            card = self._repository.card(name, version, caller)
        except NaruError as exc:
            return Response(OIP_ERRORS.body(exc), error_shape(exc).status, media_type=JSON)
        return json_page(card.config() if what == "config" else card.metadata())

    async def nothing(self, request: Request) -> Response:
        """What is not there, or takes no such method, in the protocol's form."""
        path = request.url.path
        if request.method not in _READ and (path in _FIXED or _PATH.fullmatch(path)):
            body = orjson.dumps({"error": f"{path[:200]} does not take {request.method}"})
            return Response(body, 405, headers={"allow": ", ".join(_READ)}, media_type=JSON)
        text = f"there is nothing at {request.method} {path[:200]}; docs/oip.md lists what there is"
        return Response(orjson.dumps({"error": text}), 404, media_type=JSON)


def server_metadata() -> dict[str, object]:
    """What this server is."""
    return {"name": "naru", "version": importlib.metadata.version("naru"), "extensions": list(EXTENSIONS)}
