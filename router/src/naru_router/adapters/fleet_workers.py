"""The fleet as the load desk sees it: which worker can be told to load a model, and how far that is.

Reads the fleet's map and links; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from naru_proto.errors import Unavailable
from naru_proto.v1 import worker_pb2
from naru_router.adapters.fleet import Fleet
from naru_router.adapters.health import Incarnation
from naru_router.adapters.load_site import Choose
from naru_router.core.holding import Nearness
from naru_router.core.load_choice import choose_worker


class FleetWorkers:
    """See load_site.LoadWorkers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def chooser(self, model: str, excluded: frozenset[Incarnation], coming: Callable[[], Mapping[str, str]]) -> Choose:
        """Chooses among the workers that may know the model, by the map of the moment it is asked.

        Args:
            model: as workers know it.
            excluded: workers that have failed the request.
            coming: models that are coming up just now, and where.
        """

        def choose(avoid: frozenset[str]) -> str | None:
            candidates = self._fleet.survey(model, excluded).candidates
            able = {each.worker_id for each in candidates if each.nearness is not Nearness.OUTDATED} - avoid
            return choose_worker(self._fleet.route_map, model, able, coming()) if able else None

        return choose

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Tells a worker, over the channel of its stream.

        Raises:
            NaruError: its refusal, or that it does not answer.
        """
        if not self._is_reachable(worker_id):
            raise Unavailable(f"the worker {worker_id!r} has gone; ask another one")
        link, _ = self._fleet.link(worker_id)
        return await link.move(request, timeout_s)

    def can_load(self, worker_id: str, model: str) -> bool:
        """Whether it has a lease and a stream to this router, takes requests, and did not say it lacks the model."""
        return self._is_reachable(worker_id) and any(
            each.worker_id == worker_id for each in self._fleet.survey(model).candidates
        )

    def _is_reachable(self, worker_id: str) -> bool:
        record = self._fleet.route_map.workers.get(worker_id)
        return record is not None and not record.draining and self._fleet.link(worker_id)[0].is_up

    def state(self, worker_id: str, model: str) -> str:
        """Of a model on a worker, by its lease; empty: not shown."""
        record = self._fleet.route_map.workers.get(worker_id)
        resident = None if record is None else record.models.get(model)
        return "" if resident is None else resident.state

    def is_served(self, model: str) -> bool:
        """Whether some worker that can be reached has the model ready."""
        return any(self._is_reachable(record.worker_id) for record in self._fleet.route_map.ready_workers(model))

    def mark_unknown(self, worker_id: str, model: str) -> None:
        """The worker said that it does not know the model."""
        record = self._fleet.route_map.workers.get(worker_id)
        if record is not None:
            self._fleet.mark_not_loaded((worker_id, record.epoch), model)

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change of the map or of a link, or after the time."""
        await self._fleet.changed(timeout_s)
