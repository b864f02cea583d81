"""Pages of stored responses: to read one, its input, and to delete it. A tenant sees its own alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from naru_proto.errors import InvalidRequest, NaruError, NotFound
from naru_router.adapters.http.page_replies import json_page, refusal_page
from naru_router.adapters.storage.record_store import RecordStore
from naru_router.core.caller import Caller
from naru_router.core.fields import shown
from naru_router.core.responses.stored import KIND, is_response_id, page_of

_CANCEL = "only responses that are made in the background can be cancelled, and none is: close the stream instead"


class ResponsePages:
    """Handlers of what was stored."""

    def __init__(self, store: RecordStore | None, caller_of: Callable[[Callable[[str], str | None]], Caller]) -> None:
        """`store` None: nothing is stored, and nothing found. `caller_of`: of Tenancy."""
        self._store = store
        self._caller_of = caller_of

    def routes(self) -> list[Route]:
        """Where they are."""
        return [
            Route("/v1/responses/{response_id}", self.response, methods=["GET"]),
            Route("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/input_items", self.input_items, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def response(self, request: Request) -> Response:
        """GET /v1/responses/{id}."""

        async def show(record: dict[str, Any]) -> Response:
            if request.query_params.get("stream", "false").lower() not in ("false", "0"):
                raise InvalidRequest("stream is set; what is stored is sent whole: leave it out", param="stream")
            return json_page(record["response"])

        return await self._with(request, show)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{id}."""

        async def remove(record: dict[str, Any]) -> Response:
            assert self._store is not None  # the record came from it
            await self._store.delete(KIND, self._caller_of(request.headers.get).tenant, record["id"])
            return json_page({"id": record["id"], "object": "response", "deleted": True})

        return await self._with(request, remove)

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{id}/input_items: all that it answers."""

        async def show(record: dict[str, Any]) -> Response:
            return json_page(page_of(record["input"], request.query_params))

        return await self._with(request, show)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{id}/cancel."""

        async def refuse(record: dict[str, Any]) -> Response:
            raise InvalidRequest(_CANCEL)

        return await self._with(request, refuse)

    async def _with(self, request: Request, act: Callable[[dict[str, Any]], Awaitable[Response]]) -> Response:
        """Does something with the caller's record of the request's path."""
        response_id = request.path_params["response_id"]
        try:
            caller = self._caller_of(request.headers.get)
            record = None
            if self._store is not None and is_response_id(response_id):
                record = await self._store.get(KIND, caller.tenant, response_id)
            if record is None:
                raise NotFound(f"no response is stored under {shown(response_id)}; only those made with store true are")
            return await act(record)
        except NaruError as exc:
            return refusal_page(exc)
