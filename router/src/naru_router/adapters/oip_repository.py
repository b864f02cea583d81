"""The models of the Open Inference Protocol as a repository: listed, described, brought up, taken down. For both edges.

To load is what a request for a cold model does, too. To unload moves idle copies off; who needs the model kept is not
overridden: the control plane would bring it back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from naru_proto.errors import InvalidRequest, LoadError, NaruError, Overloaded, Unavailable
from naru_proto.registry import ModelInfoRecord, ModelRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters.dispatcher import Dispatcher
from naru_router.adapters.facts import ModelFacts
from naru_router.adapters.fleet import Fleet
from naru_router.core.caller import Caller
from naru_router.core.envelope import Envelope
from naru_router.core.oip.kinds import VERSION, Card, card_of, check_version
from naru_router.core.oip.statistics import CallCounts
from naru_router.core.waiting import still_loading

MOVE_TIMEOUT_S = 2.0
"""A worker says at once whether it sets out."""
SEEN_TIMEOUT_S = 5.0
"""Until the route map shows what a worker has done: its lease is read twice in that time."""
_COMING = ("loading", "fetching")


class Workers(Protocol):
    """Reaches workers; see adapters.fleet_workers."""

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        """Tells a worker.

        Raises:
            NaruError: it refuses, or does not answer.
        """


class OipRepository:
    """What the protocol knows of models."""

    def __init__(
        self, fleet: Fleet, facts: ModelFacts, dispatcher: Dispatcher, workers: Workers, is_serving: Callable[[], bool]
    ) -> None:
        """`is_serving`: whether requests are taken."""
        self._fleet = fleet
        self._facts = facts
        self._dispatcher = dispatcher
        self._workers = workers
        self._is_serving = is_serving
        self.counts = CallCounts()

    @property
    def is_serving(self) -> bool:
        """Whether requests are taken."""
        return self._is_serving()

    def is_ready(self, name: str, version: str, caller: Caller) -> bool:
        """Whether some worker has the model loaded.

        Raises:
            ModelNotFound: no such model or version.
        """
        entry = self._entry(name, version, caller)
        return bool(self._fleet.ready(_serving(entry)))

    def index(self, caller: Caller, *, only_ready: bool) -> list[dict[str, object]]:
        """The models by name; aliases stand for models that are listed."""
        found: list[dict[str, object]] = []
        for name in self._fleet.route_map.entries(caller):
            state, reason = self._state(_serving(self._fleet.route_map.models[name]))
            if not only_ready or state == "READY":
                found.append({"name": name, "version": VERSION, "state": state, "reason": reason})
        return found

    def _state(self, model: str) -> tuple[str, str]:
        route_map = self._fleet.route_map
        if self._fleet.ready(model):
            return "READY", ""
        if any(
            worker.models[model].state in _COMING for worker in route_map.workers.values() if model in worker.models
        ):
            return "LOADING", ""
        failures = route_map.failures(model)
        return "UNAVAILABLE", failures[0] if failures else "no copy is loaded; a request brings one up"

    def card(self, name: str, version: str, caller: Caller) -> Card:
        """What a model takes and gives, as far as it was ever loaded.

        Raises:
            ModelNotFound: no such model or version.
            Unavailable: no worker has loaded it yet.
        """
        self._entry(name, version, caller)
        service = self._fleet.route_map.resolve(name, caller)
        info = self._fleet.route_map.info(service.model.name)
        if info is None:
            raise Unavailable(
                f"what the model {name[:200]!r} takes is known once a worker has loaded it; load it, or send a request"
            )
        return card_of(name, info)

    async def card_for(self, name: str, version: str, envelope: Envelope) -> Card:
        """The same for a call: a model that was never loaded is brought up first, or one that stands in for it answers.

        Raises:
            NaruError: it cannot be loaded, or not in time.
        """
        self._entry(name, version, envelope.caller)
        info: ModelInfoRecord | None = None
        try:
            while info is None:
                service = self._fleet.route_map.resolve(name, envelope.caller)
                info = await self._facts.of(service, name, envelope.timeout_s)
        except (Unavailable, LoadError, Overloaded):
            route_map = self._fleet.route_map
            others = [route_map.info(each.model.name) for each in route_map.stand_ins(name, envelope.caller)]
            info = next((each for each in others if each is not None), None)
            if info is None:
                raise
        return card_of(name, info)

    def entry_name(self, name: str, caller: Caller) -> str:
        """The model's own name for a name or alias.

        Raises:
            ModelNotFound: no such model.
        """
        return self._entry(name, "", caller).name

    def statistics(self, name: str, version: str, caller: Caller) -> list[dict[str, object]]:
        """Of one model, or of all for an empty name.

        Raises:
            ModelNotFound: no such model or version.
        """
        names = [self._entry(name, version, caller).name] if name else self._fleet.route_map.entries(caller)
        return [self.counts.of(each).to_json(each, VERSION) for each in names]

    async def load(self, name: str, envelope: Envelope) -> None:
        """Returns when some worker has the model ready.

        Raises:
            ModelNotFound: no such model.
            NaruError: it cannot be loaded, or not in time.
        """
        entry = self._entry(name, "", envelope.caller)
        model = _serving(entry)
        if self._fleet.ready(model):
            return
        with self._dispatcher.seat(model, entry.max_depth) as seat:
            seat.take()
            try:
                async with asyncio.timeout(envelope.timeout_s or None):
                    await self._dispatcher.bring_up(model, entry.max_wait_s)
            except TimeoutError as exc:
                raise still_loading(name, self._dispatcher.times.left(model)) from exc
        await self._seen(lambda: bool(self._fleet.ready(model)))

    async def unload(self, name: str, caller: Caller) -> None:
        """Has all copies of a model taken down; returns when that is under way, and seen where it is seen soon.

        Raises:
            ModelNotFound: no such model.
            InvalidRequest: the caller may not, or the model is to be kept up.
            Unavailable: a copy has requests in flight, or its worker does not answer.
        """
        entry = self._entry(name, "", caller)
        check_may_unload(entry, caller)
        model = _serving(entry)
        holders = [worker.worker_id for worker in self._fleet.route_map.ready_workers(model)]
        request = worker_pb2.MoveRequest(model=model, tier=worker_pb2.TIER_COLD, only_if_idle=True)
        moves = [self._workers.move(worker_id, request, MOVE_TIMEOUT_S) for worker_id in holders]
        for outcome in await asyncio.gather(*moves, return_exceptions=True):
            if isinstance(outcome, NaruError):
                raise Unavailable(
                    f"the model {name[:200]!r} was not unloaded everywhere: {outcome.message}"
                ) from outcome
            if isinstance(outcome, BaseException):
                raise outcome
        await self._seen(lambda: not self._fleet.route_map.ready_workers(model))

    async def _seen(self, is_true: Callable[[], bool]) -> None:
        """Returns when the route map shows what a worker has done, or could have."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEEN_TIMEOUT_S):
                while not is_true():
                    await self._fleet.changed(SEEN_TIMEOUT_S)

    def _entry(self, name: str, version: str, caller: Caller) -> ModelRecord:
        entry = self._fleet.route_map.entry(name, caller)
        check_version(name, version)
        return entry


def check_may_unload(entry: ModelRecord, caller: Caller) -> None:
    """Checks that a model may be taken down by somebody: where tenants are set up, one that it alone may use.

    Raises:
        InvalidRequest: saying why not.
    """
    if caller.tenant and entry.allow != (caller.tenant,):
        raise InvalidRequest(
            f"the model {entry.name!r} serves other tenants, too; only its sole tenant may unload it", param="model"
        )
    if entry.policy == "pinned":
        raise InvalidRequest(
            f"the model {entry.name!r} is pinned and would be brought back; change residency.policy", param="model"
        )
    if entry.min_replicas > 0 and not entry.on_demand:
        raise InvalidRequest(
            f"the model {entry.name!r} is to have at least {entry.min_replicas} copies and would be brought back; set "
            "replicas.min to 0",
            param="model",
        )


def _serving(entry: ModelRecord) -> str:
    """What workers hold for an entry."""
    return entry.target or entry.name
