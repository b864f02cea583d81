"""What every router remembers of models over time, so that whoever becomes keeper knows it. Pure.

Since when copies are missing, too many, misplaced or on a worker that leaves; since when each is ready; what load was.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TypeVar

from naru_proto.placement import HeldState
from naru_proto.registry import ModelRecord
from naru_router.core.keeper.demand import Demand
from naru_router.core.keeper.model import UP_STATES, KeeperLimits, KeeperView

_Key = TypeVar("_Key", bound=Hashable)

_PIECE = 50
"""Models that are looked at without a pause: about a millisecond."""
_FLOOR_RECENT_S = 60.0
"""A model on demand has its least copies while it is used; after that its worker's idle time decides."""


class Watch:
    """Mutable; `observing` is run through about once a second. Times are of one clock that never goes back."""

    def __init__(self, limits: KeeperLimits) -> None:
        self._limits = limits
        self.demands: dict[str, Demand] = {}
        self.restless: frozenset[str] = frozenset()
        """Models that may need a move; all others have what they need."""
        self._missing: dict[str, float] = {}
        self._surplus: dict[str, float] = {}
        self._leaving: dict[str, float] = {}
        self._misplaced: dict[tuple[str, str], float] = {}
        self._ready: dict[tuple[str, str], float] = {}
        self._ups: dict[str, frozenset[str]] = {}
        self._changed: dict[str, float] = {}
        self._used: dict[str, int] = {}

    def observing(self, view: KeeperView, now_s: float) -> Iterator[None]:
        """Takes one instant; yields where a caller may do something else for a moment."""
        ready = {
            (model, worker_id)
            for model, copies in view.copies.items()
            for worker_id, held in copies.items()
            if held.state is HeldState.READY
        }
        self._ready = _since(self._ready, ready, now_s)
        self._leaving = _since(self._leaving, {slot.worker_id for slot in view.slots if slot.is_leaving}, now_s)
        wrong = {p for p in ready if p[0] in view.models and not view.may_hold(p[1], view.models[p[0]])}
        self._misplaced = _since(self._misplaced, wrong, now_s)
        for gone in self.demands.keys() - view.models.keys():
            del self.demands[gone], self._ups[gone], self._changed[gone], self._used[gone]
        yield
        restless = {name for name, _ in wrong}
        missing, surplus = set(), set()
        for index, (name, record) in enumerate(view.models.items()):
            num_up = self._observe_model(view, name, record, now_s)
            if num_up < self.floor(name, record, now_s):
                missing.add(name)
            if num_up > self.ceiling(record):
                surplus.add(name)
            if self._is_restless(view, name, record, num_up, now_s):
                restless.add(name)
            if index % _PIECE == _PIECE - 1:
                yield
        self._missing = _since(self._missing, missing, now_s)
        self._surplus = _since(self._surplus, surplus, now_s)
        self.restless = frozenset(restless | missing | surplus)

    def floor(self, name: str, record: ModelRecord, now_s: float) -> int:
        """Copies that there must be now."""
        demand = self.demands.get(name)
        if record.on_demand and (demand is None or not demand.num_up or not demand.is_recent(now_s, _FLOOR_RECENT_S)):
            return 0
        return record.min_replicas

    @staticmethod
    def ceiling(record: ModelRecord) -> float:
        """Copies that there may be."""
        return max(record.max_replicas, record.min_replicas) if record.max_replicas > 0 else math.inf

    def is_recent(self, name: str, now_s: float) -> bool:
        """Whether the model was used lately."""
        demand = self.demands.get(name)
        return demand is not None and demand.is_recent(now_s, self._limits.recent_s)

    def is_missing(self, name: str, now_s: float) -> bool:
        """Whether copies have been missing for long enough to be brought up."""
        return _is_since(self._missing, name, now_s, self._limits.missing_s)

    def is_surplus(self, name: str, now_s: float) -> bool:
        """Whether there have been too many copies for long enough to take one down."""
        return _is_since(self._surplus, name, now_s, self._limits.missing_s)

    def is_misplaced(self, name: str, worker_id: str, now_s: float) -> bool:
        """Whether a copy has been where it may not be for long enough to take it down."""
        return _is_since(self._misplaced, (name, worker_id), now_s, self._limits.missing_s)

    def leaving_s(self, worker_id: str, now_s: float) -> float:
        """For how long a worker has been leaving."""
        return now_s - self._leaving.get(worker_id, now_s)

    def missing_s(self, name: str, now_s: float) -> float:
        """For how long copies have been missing; 0: none are."""
        return now_s - self._missing.get(name, now_s)

    def resident_s(self, name: str, worker_id: str, now_s: float) -> float:
        """For how long a copy has been seen ready; at most since this router's start."""
        return now_s - self._ready.get((name, worker_id), now_s)

    def settled_s(self, name: str, now_s: float) -> float:
        """For how long the model's copies have been the same."""
        return now_s - self._changed.get(name, now_s)

    def _is_restless(self, view: KeeperView, name: str, record: ModelRecord, num_up: int, now_s: float) -> bool:
        demand = self.demands[name]
        kept = demand.num_kept(record, now_s)
        if kept is not None and num_up > max(kept, 1, self.floor(name, record, now_s)):
            return True
        return demand.num_wanted(record) > num_up > 0 or any(
            view.by_worker[worker_id].is_leaving for worker_id in view.copies.get(name, ())
        )

    def _observe_model(self, view: KeeperView, name: str, record: ModelRecord, now_s: float) -> int:
        copies = view.copies.get(name, {})
        ups = frozenset(
            worker_id
            for worker_id, held in copies.items()
            if held.state in UP_STATES and not view.by_worker[worker_id].is_leaving and view.may_hold(worker_id, record)
        )
        if ups != self._ups.get(name):
            self._ups[name] = ups
            self._changed[name] = now_s
        demand = self.demands.get(name)
        if demand is None:
            demand = self.demands[name] = Demand(now_s, now_s)
        queues = [
            view.loads[worker_id, name].queue_s
            for worker_id in ups
            if copies[worker_id].state is HeldState.READY and (worker_id, name) in view.loads
        ]
        is_all_told = len(queues) == sum(copies[w].state is HeldState.READY for w in ups)
        num_in_flight = sum(view.num_in_flight(worker_id, name) for worker_id in copies)
        queue_s = min(queues, default=0.0) if is_all_told else 0.0
        demand.observe(record, num_in_flight, queue_s, len(ups), self._limits.headroom, now_s)
        # Requests that came and went between two looks leave their time.
        used = max((held.last_used_s for held in copies.values()), default=0)
        if name in self._used and used > self._used[name]:
            demand.active_s = now_s
        self._used[name] = max(used, self._used.get(name, 0))
        return len(ups)


def _since(before: dict[_Key, float], holds: set[_Key], now_s: float) -> dict[_Key, float]:
    """Since when each that holds now has held."""
    return {key: before.get(key, now_s) for key in holds}


def _is_since(since: dict[_Key, float], key: _Key, now_s: float, for_s: float) -> bool:
    return key in since and now_s - since[key] >= for_s
