"""GET pages: models, health, readiness, metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from naru_proto.errors import NaruError, Unauthenticated
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.gate import Gate
from naru_router.adapters.http.page_replies import json_page, refusal_page
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.presence import Presence
from naru_router.adapters.registry import RegistryReader
from naru_router.adapters.tenancy.tenancy import Tenancy
from naru_router.core.model_state import model_card


class Pages:
    """Handlers that only read."""

    def __init__(
        self,
        fleet: Fleet,
        registry: RegistryReader,
        gate: Gate,
        metrics: Metrics,
        tenancy: Tenancy,
        presence: Presence,
    ) -> None:
        self._tenancy = tenancy
        self._presence = presence
        self._fleet = fleet
        self._registry = registry
        self._gate = gate
        self._metrics = metrics

    async def models(self, request: Request) -> Response:
        """GET /v1/models: every name that can be asked for, aliases too."""
        route_map = self._fleet.route_map
        try:
            caller = self._tenancy.caller_by(request.headers.get)
        except Unauthenticated as exc:
            return refusal_page(exc)
        cards = [model_card(name, route_map.entry(name, caller), route_map) for name in route_map.names(caller)]
        return json_page({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        route_map = self._fleet.route_map
        # Not the matched parameter: what ends in a newline would match without it.
        name = request.scope["path"].removeprefix("/v1/models/")
        try:
            record = route_map.entry(name, self._tenancy.caller_by(request.headers.get))
        except NaruError as exc:
            return refusal_page(exc)
        return json_page(model_card(name, record, route_map))

    async def health(self, request: Request) -> Response:
        """GET /health, /healthz: the process answers."""
        return json_page({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 once the route map has been read and until the router leaves, Redis away or not.

        Costs the same however many models and workers there are.
        """
        status = self._status()
        return json_page({"status": status}, 200 if status == "ready" else 503)

    def _status(self) -> str:
        if self._gate.is_leaving:
            return "draining"
        return "ready" if self._registry.status.has_map else "starting"

    async def readyz(self, request: Request) -> Response:
        """GET /readyz: the same, and what the router knows, for people."""
        status = self._registry.status
        route_map = self._fleet.route_map
        word = self._status()
        detail = {
            "status": word,
            "registry": {
                "up": status.is_up,
                "age_s": round(status.age_s, 3),
                "problem": status.problem or None,
            },
            "models": {
                name: len(route_map.ready_workers(route_map.models[name].target or name))
                for name in route_map.entries()
            },
            "tasks": {
                name: list(info.tasks)
                for name in route_map.entries()
                if (info := route_map.info(route_map.models[name].target or name)) is not None
            },
            "workers": {"leased": len(route_map.workers), "connected": self._fleet.num_up()},
            "routers": {"seen": self._presence.num_routers, "problem": self._presence.problem or None},
            "requests": self._gate.num_inside,
            "tenancy": self._tenancy.status(),
        }
        return json_page(detail, 200 if word == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.exposition(), headers={"content-type": self._metrics.content_type})
