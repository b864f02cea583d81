"""Facts of models that no worker has loaded yet, or not since this router started: a chat cannot be rendered without.

Used by the job maker. All who want the facts of one model wait for one request that brings it up, each for its own
time.
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
from naru_router.adapters.load_times import LoadTimes
from naru_router.core.route_map import Service
from naru_router.core.waiting import Outlook, check_hope, unavailable

_LOOK_AGAIN_S = 1.0
"""Between two looks at whether another model serves the name by now."""
_SEARCH_S = 86_400.0
"""A search lasts as long as somebody waits for it."""


@dataclass(slots=True, eq=False)
class _Search:
    task: asyncio.Task[ModelInfoRecord]
    num_waiters: int = 0


class ModelFacts:
    """Finds the facts of models."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        times: LoadTimes | None = None,
        *,
        max_wait_s: float = 30.0,
        refresh: Callable[[], None],
    ) -> None:
        """`max_wait_s`: the router's own limit; `refresh` asks for a new reading of the route map."""
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._times = times or LoadTimes(lambda: fleet.route_map, lambda model: None)
        self._max_wait_s = max_wait_s
        self._refresh = refresh
        self._searches: dict[str, _Search] = {}

    async def of(self, service: Service, name: str, timeout_s: float = 0.0) -> ModelInfoRecord | None:
        """The facts of what serves `name`, at once where they are known; else the model is brought up first.

        None: another model serves the name by now.

        Args:
            service: what serves the name.
            name: what the client asked for.
            timeout_s: after so long they are of no use; 0: the model's limit, or the router's, alone counts.

        Raises:
            Unavailable: no worker can serve it in time.
            Overloaded: too many wait for it already.
            NaruError: it cannot be loaded.
        """
        model = service.model.name
        known = self._fleet.route_map.info(model)
        if known is not None:
            return known
        wait_s = service.max_wait_s or self._max_wait_s
        deadline_s = time.monotonic() + (min(wait_s, timeout_s) if timeout_s > 0 else wait_s)
        with self._dispatcher.seat(model, service.max_depth) as seat:
            seat.take()
            return await self._join(model, name, deadline_s)

    async def _join(self, model: str, name: str, deadline_s: float) -> ModelInfoRecord | None:
        search = self._searches.get(model)
        if search is None:
            task = asyncio.create_task(self._search(model), name=f"facts of {model}")
            search = self._searches[model] = _Search(task)
        search.num_waiters += 1
        try:
            while not search.task.done():
                if self._fleet.route_map.has_moved(name, model):
                    return None
                await self._wait(search, model, deadline_s - time.monotonic())
        finally:
            search.num_waiters -= 1
            if search.num_waiters == 0:
                # The last one: done, or nobody wants it any more. The load goes on.
                search.task.cancel()
                if self._searches.get(model) is search:
                    del self._searches[model]
        error = search.task.exception()
        if isinstance(error, NaruError):
            raise copy.copy(error)  # each has a trace of its own
        return search.task.result()

    async def _wait(self, search: _Search, model: str, rest_s: float) -> None:
        left = self._times.left(model)
        if rest_s <= 0:
            survey = self._fleet.survey(model)
            num_coming = survey.num_pending + len(survey.candidates)
            outlook = Outlook(num_coming, survey.num_unaware, survey.failures)
            raise unavailable(base_name(model), outlook, left, is_over=True)
        check_hope(base_name(model), left, rest_s)
        await asyncio.wait({search.task}, timeout=min(rest_s, _LOOK_AGAIN_S))

    async def _search(self, model: str) -> ModelInfoRecord:
        await self._dispatcher.bring_up(model, _SEARCH_S)
        self._refresh()
        deadline_s = time.monotonic() + WORKER_LEASE_TTL_S
        while (found := self._fleet.route_map.info(model)) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise Unavailable(f"the chat template of {base_name(model)!r} is not known yet; send the request again")
            await self._fleet.changed(remaining_s)
        return found
