"""Tells what became of every ModelDeployment: its status, and events worth having. Called by the term."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from naru_operator.adapters.cluster.event_sender import EventSender
from naru_operator.adapters.cluster.models import KIND, ParsedModel
from naru_operator.adapters.cluster.status_writer import StatusWriter
from naru_operator.adapters.route_map import ModelEvent, RouteMap
from naru_operator.core.kube import ObjectKey
from naru_operator.core.models.changes import is_progress_only, model_events
from naru_operator.core.models.facts import Eviction, model_facts, read_eviction
from naru_operator.core.models.model import ClusterWorker, ModelsPlan
from naru_operator.core.models.status import model_status
from naru_proto.crd.v1alpha1 import ModelDeploymentStatus

_FIRST_EVENTS = 2000
"""Events that are read at the start: evictions before them are no news."""
_PAGE = 1000
_AT_ONCE = 64
"""Statuses computed before others may run."""
_MOVING = frozenset(("Pending", "Placing", "Fetching", "Loading", "Draining", "Degraded", "Failed"))


class ModelTellings:
    """Statuses of the models. asyncio thread only."""

    def __init__(self, events: EventSender, statuses: StatusWriter, route_map: RouteMap) -> None:
        self._events, self._statuses, self._route_map = events, statuses, route_map
        self._evictions: dict[str, Eviction] = {}
        """The last one of each registry name."""
        self._last_event = ""
        self.is_moving = False
        """Whether something is still to be told, or will change soon."""

    async def turn(
        self,
        models: Mapping[ObjectKey, ParsedModel],
        plan: ModelsPlan,
        workers: Mapping[str, ClusterWorker],
        failed: Mapping[str, str],
        *,
        now_s: int,
    ) -> None:
        """Computes every status and has those written that differ.

        Raises:
            Unavailable: Redis does not answer.
        """
        self.is_moving = False
        await self._read_evictions()
        for number, (key, parsed) in enumerate(models.items()):
            if number % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # thousands of statuses take a second
            verdict = plan.verdicts.get(key)
            if verdict is None:
                continue  # it is being deleted
            previous = self._statuses.last(KIND, key, parsed.version[0], parsed.status)
            assert isinstance(previous, ModelDeploymentStatus)
            facts = model_facts(verdict, workers, failed, self._evictions)
            generation = parsed.raw["metadata"].get("generation")
            status = model_status(verdict, facts, previous, generation=generation, now_s=now_s)
            if status.phase in _MOVING:
                self.is_moving = True
            if status != previous:
                self._tell(key, parsed, previous, status)
        self._forget_evictions(plan)

    def _tell(
        self, key: ObjectKey, parsed: ParsedModel, previous: ModelDeploymentStatus, status: ModelDeploymentStatus
    ) -> None:
        is_minor = is_progress_only(previous, status)
        is_told = self._statuses.tell(KIND, key, parsed.raw, status, is_progress_only=is_minor)
        if not is_told:
            self.is_moving = True
            return
        for event in model_events(key, previous, status):
            self._events.send(event, parsed.raw)

    async def _read_evictions(self) -> None:
        if not self._last_event:
            events = await self._route_map.last_events(_FIRST_EVENTS)
            self._last_event = "0-0"
            self._take(events)
            return
        while True:
            events = await self._route_map.events_since(self._last_event, _PAGE)
            self._take(events)
            if len(events) < _PAGE:
                return

    def _take(self, events: list[ModelEvent]) -> None:
        for event in events:
            eviction = read_eviction(event.worker_id, event.old, event.new, event.reason, event.at_s)
            if eviction is not None:
                self._evictions[event.model] = eviction
            self._last_event = event.entry_id

    def _forget_evictions(self, plan: ModelsPlan) -> None:
        if len(self._evictions) > 2 * len(plan.applied) + _FIRST_EVENTS:
            self._evictions = {name: it for name, it in self._evictions.items() if name in plan.applied}
