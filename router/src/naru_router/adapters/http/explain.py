"""Pages about placement, for `naru explain placement`: answered by any router from its own map.

A tenant sees the models that it may use, and no name of another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from naru_proto.crd.manifests import load_manifests
from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.errors import InvalidRequest, ModelNotFound, NaruError
from naru_proto.registry import ModelRecord
from naru_router.adapters.http.page_replies import json_page, refusal_page
from naru_router.adapters.keeper.loop import KeeperLoop
from naru_router.core.caller import Caller
from naru_router.core.json_body import parse_object
from naru_router.core.keeper.explain import MaySee, dry_run, model_page, record_of, worker_page
from naru_router.core.keeper.model import KeeperView
from naru_router.core.route_map import RouteMap
from naru_router.core.tenancy.visibility import may_use

MAX_MANIFEST_BYTES = 1024 * 1024
_MAX_BYTES = 1 << 50
"""More than any machine has."""
_MAX_POOLS = 100
_FIELDS = frozenset({"manifest", "pools", "num_bytes"})


class PlacementPages:
    """Handlers that explain placement."""

    def __init__(
        self,
        loop: KeeperLoop,
        route_map: Callable[[], RouteMap],
        caller_of: Callable[[Callable[[str], str | None]], Caller],
    ) -> None:
        self._loop = loop
        self._route_map = route_map
        self._caller_of = caller_of

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/v1/naru/placement", self.placement),
            Route("/v1/naru/placement", self.dry_run, methods=["POST"]),
        ]

    async def placement(self, request: Request) -> Response:
        """GET /v1/naru/placement: all models and workers; with `?model=NAME` that one alone."""
        try:
            caller = self._caller_of(request.headers.get)
            return json_page(self._page(caller, request.query_params.get("model", "")))
        except NaruError as exc:
            return refusal_page(exc)

    async def dry_run(self, request: Request) -> Response:
        """POST /v1/naru/placement: where the ModelDeployment of `manifest` would go; nothing is changed.

        `pools` names those that may hold it (absent: any), `num_bytes` says what a copy takes.
        """
        try:
            caller = self._caller_of(request.headers.get)
            manifest, pools, num_bytes = _read(parse_object(await _body(request)))
            view = self._loop.sight.view()
            may_see = _may_see(view, caller)
            return json_page(dry_run(view, record_of(manifest, pools), num_bytes, may_see))
        except NaruError as exc:
            return refusal_page(exc)

    def _page(self, caller: Caller, asked: str) -> dict[str, Any]:
        view, now_s = self._loop.sight.view(), self._loop.now_s()
        may_see = _may_see(view, caller)
        if asked:
            entry = self._route_map().entry(asked, caller)
            chosen = [entry.target or entry.name]
            if chosen[0] not in view.models:
                raise ModelNotFound(f"the model {asked[:200]!r} is served by nothing at the moment", param="model")
        else:
            chosen = sorted(filter(may_see, view.models))
        return {
            "is_keeper": self._loop.is_keeper,
            "models": [model_page(view, self._loop.keeper, name, now_s, may_see) for name in chosen],
            "workers": [worker_page(slot, may_see) for slot in view.slots],
            "moves": [
                {
                    "at_s": round(note.at_s, 3),
                    "model": note.move.model,
                    "worker": note.move.worker_id,
                    "direction": note.move.direction.value,
                    "reason": note.move.reason.value,
                    "why": note.move.why if caller.tenant == "" else "",
                    "refusal": note.refusal or None,
                }
                for note in reversed(self._loop.recent)
                if note.move.model in chosen
            ],
        }


def _may_see(view: KeeperView, caller: Caller) -> MaySee:
    def may_see(name: str) -> bool:
        entry: ModelRecord | None = view.models.get(name)
        return may_use(caller, entry) if entry is not None else caller.tenant == ""

    return may_see


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_MANIFEST_BYTES:
            raise InvalidRequest(f"the body is larger than {MAX_MANIFEST_BYTES} bytes; send one manifest")
        parts.append(part)
    return b"".join(parts)


def _read(body: dict[str, object]) -> tuple[ModelDeployment, tuple[str, ...], int]:
    unknown = sorted(body.keys() - _FIELDS)
    if unknown:
        raise InvalidRequest(f"unknown field {unknown[0][:64]!r}; known are {', '.join(sorted(_FIELDS))}")
    manifests = load_manifests([body.get("manifest")])
    manifest = manifests[0] if len(manifests) == 1 else None
    if not isinstance(manifest, ModelDeployment):
        raise InvalidRequest("manifest must be one ModelDeployment, as a JSON object", param="manifest")
    pools = body.get("pools", [])
    if not isinstance(pools, list) or len(pools) > _MAX_POOLS or not all(isinstance(p, str) for p in pools):
        raise InvalidRequest(f"pools must be a list of at most {_MAX_POOLS} names of pools", param="pools")
    num_bytes = body.get("num_bytes", 0)
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool) or not 0 <= num_bytes <= _MAX_BYTES:
        raise InvalidRequest(f"num_bytes must be a whole number in [0, {_MAX_BYTES}]", param="num_bytes")
    return manifest, tuple(pools), num_bytes
