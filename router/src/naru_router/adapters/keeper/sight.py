"""What the keeper sees: the last route map as placement's words, and the load that workers told on their streams.

Asked each second by the keeper's loop, and by the pages that explain placement. Reads no Redis of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from naru_proto.placement import WorkerSlot, served, slots_of
from naru_proto.registry import ModelRecord
from naru_router.core.keeper.model import CopyLoad, KeeperView
from naru_router.core.route_map import RouteMap


class ToldLoad(Protocol):
    """One model's load on one worker, as its frames say; see naru.v1.ModelLoad."""

    @property
    def num_running(self) -> int:
        """Requests in the engine."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait, held ones included."""

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are neither cached nor computed."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured; 0: not known."""


class Sight:
    """Makes views. Keeps what belongs to one map until the next one comes."""

    def __init__(self, route_map: Callable[[], RouteMap], load: Callable[[str, str], ToldLoad | None]) -> None:
        """`load`: of (worker id, model); None: the worker has told nothing of it."""
        self._route_map = route_map
        self._load = load
        self._last: RouteMap | None = None
        self._models: dict[str, ModelRecord] = {}
        self._slots: tuple[WorkerSlot, ...] = ()

    def view(self) -> KeeperView:
        """This instant."""
        route_map = self._route_map()
        if route_map is not self._last:
            self._models = {name: each for name, each in served(route_map.models).items() if name in route_map.models}
            self._slots = slots_of(
                route_map.workers,
                known=route_map.known,
                models=route_map.models,
                footprints=route_map.footprints,
                nodes=route_map.nodes,
            )
            self._last = route_map
        loads = {}
        for slot in self._slots:
            for model in slot.holding:
                told = self._load(slot.worker_id, model)
                if told is not None:
                    loads[slot.worker_id, model] = copy_load(told)
        return KeeperView(self._models, self._slots, loads, route_map.footprints)


def copy_load(told: ToldLoad) -> CopyLoad:
    """What a worker's numbers mean: a prompt that comes now waits for the tokens before it."""
    speed = told.prefill_tokens_per_s
    return CopyLoad(told.num_running + told.num_waiting, told.waiting_tokens / speed if speed > 0 else 0.0)
