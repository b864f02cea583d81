"""/v1/batches: make, list, look at and cancel batches. What works on them is adapters/batches."""

from __future__ import annotations

from dataclasses import dataclass

from naru_router.adapters.batches.batch_store import BatchStore
from naru_router.adapters.batches.runner import BatchRunner
from naru_router.adapters.http.body import read_object
from naru_router.adapters.http.messages import HttpRequest, Reply
from naru_router.adapters.http.resource import ResourceEndpoint, send_object
from naru_router.core.batches.record import read_batch
from naru_router.core.caller import Caller
from naru_router.core.listing import page_of, read_listing, read_query


@dataclass(frozen=True, slots=True)
class BatchDesk:
    """What the endpoints work with."""

    store: BatchStore
    runner: BatchRunner


class BatchesEndpoint(ResourceEndpoint[BatchDesk]):
    """POST and GET /v1/batches."""

    name = "batches"
    methods = (b"GET", b"POST")

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: BatchDesk) -> None:
        """Makes a batch, or lists batches."""
        if request.method == b"POST":
            asked = read_batch(read_object(request, self._edge.max_body_bytes), shelf.runner.paths)
            made = await shelf.store.create(caller.tenant, asked)
            shelf.runner.wake()
            send_object(reply, made)
            return
        listing = read_listing(read_query(request.target), usual=20, most=100)
        batches, has_more = await shelf.store.list(caller.tenant, listing)
        send_object(reply, page_of(batches, has_more=has_more))


class BatchEndpoint(ResourceEndpoint[BatchDesk]):
    """GET /v1/batches/{id}."""

    name = "batch"

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: BatchDesk) -> None:
        """Shows a batch's object."""
        send_object(reply, await shelf.store.object(caller.tenant, request.params["id"]))


class BatchCancelEndpoint(ResourceEndpoint[BatchDesk]):
    """POST /v1/batches/{id}/cancel."""

    name = "batch_cancel"
    methods = (b"POST",)

    async def answer(self, request: HttpRequest, reply: Reply, caller: Caller, shelf: BatchDesk) -> None:
        """Asks for a batch's end."""
        cancelled = await shelf.store.cancel(caller.tenant, request.params["id"])
        shelf.runner.wake()
        send_object(reply, cancelled)
