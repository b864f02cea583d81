"""Facts of models that no worker has loaded yet, or not since this router started: a chat cannot be rendered without.

Used by the job maker. All who want the facts of one model wait for one request that brings it up.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

from naru_proto.errors import NaruError, Unavailable
from naru_proto.names import WORKER_LEASE_TTL_S, base_name
from naru_proto.registry import ModelInfoRecord
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.fleet import Fleet
from naru_router.core.route_map import Service

_LOOK_AGAIN_S = 1.0
"""Between two looks at whether another model serves the name by now."""


@dataclass(slots=True, eq=False)
class _Search:
    task: asyncio.Task[ModelInfoRecord]
    num_waiters: int = 0


class ModelFacts:
    """Finds the facts of models."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, *, refresh: Callable[[], None]) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._refresh = refresh
        """Asks for a new reading of the route map."""
        self._searches: dict[str, _Search] = {}

    async def of(self, service: Service, name: str) -> ModelInfoRecord | None:
        """The facts of what serves `name`, at once where they are known; else the model is brought up first.

        None: another model serves the name by now.

        Raises:
            Unavailable: no worker can serve it in time.
            Overloaded: too many wait for it already.
            NaruError: it cannot be loaded.
        """
        model = service.model.name
        known = self._fleet.route_map.info(model)
        if known is not None:
            return known
        with self._dispatcher.seat(model, service.max_depth) as seat:
            seat.take()
            return await self._join(service, name)

    async def _join(self, service: Service, name: str) -> ModelInfoRecord | None:
        model = service.model.name
        search = self._searches.get(model)
        if search is None:
            work = self._search(model, service.max_wait_s)
            search = self._searches[model] = _Search(asyncio.create_task(work, name=f"facts of {model}"))
        search.num_waiters += 1
        try:
            while not search.task.done():
                if self._fleet.route_map.has_moved(name, model):
                    return None
                await asyncio.wait({search.task}, timeout=_LOOK_AGAIN_S)
        finally:
            search.num_waiters -= 1
            if search.num_waiters == 0:
                # The last one: done, or nobody wants it any more.
                search.task.cancel()
                if self._searches.get(model) is search:
                    del self._searches[model]
        error = search.task.exception()
        if isinstance(error, NaruError):
            raise copy.copy(error)  # each has a trace of its own
        return search.task.result()

    async def _search(self, model: str, max_wait_s: float) -> ModelInfoRecord:
        await self._dispatcher.bring_up(model, max_wait_s)
        self._refresh()
        deadline_s = time.monotonic() + WORKER_LEASE_TTL_S
        while (found := self._fleet.route_map.info(model)) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise Unavailable(f"the chat template of {base_name(model)!r} is not known yet; send the request again")
            await self._fleet.changed(remaining_s)
        return found
