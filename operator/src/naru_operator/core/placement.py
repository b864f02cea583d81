"""Which workers should hold or know which models. Shared by the plan of one machine and by that of a cluster. Pure.

Decides for the number of copies alone; how a copy gets there, and when one that is too many may go, is the plans' part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Rank = tuple[int, ...]
"""How soon a copy gives way when there are too many: the lowest stay. Compared with ranks of the same model only."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that models may be placed on."""

    worker_id: str
    pool: str
    holding: Mapping[str, Rank] = field(default_factory=dict)
    """Models that it holds or knows."""
    free_bytes: int | None = None
    """Left of its budget; None: not known."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How many workers should hold a model."""

    model: str
    pools: tuple[str, ...]
    num_copies: int | None
    """None: every worker of its pools knows it, which takes no memory."""
    num_bytes: int = 0
    """What a copy takes; 0: not known."""


def place(demands: Iterable[Demand], candidates: Iterable[Candidate]) -> dict[str, tuple[str, ...]]:
    """Model to its workers, in name order.

    Copies stay where they are. New ones go, largest first, to the worker where they fit with the least room left; where
    bytes are not known, or it fits nowhere, to the one with most room, then with the fewest copies. Ties go by name.
    """
    demands, candidates = list(demands), sorted(candidates, key=lambda each: each.worker_id)
    copies = [demand for demand in demands if demand.num_copies is not None]
    board = _Board(candidates)
    # All that stay first: a new copy must not move one that is placed.
    placement = {demand.model: board.staying(demand) for demand in copies}
    for demand in sorted(copies, key=lambda each: -each.num_bytes):
        board.add_copies(demand, placement[demand.model])
    known = {each.model: board.workers_of(each.pools) for each in demands if each.num_copies is None}
    return {model: tuple(sorted(workers)) for model, workers in placement.items()} | known


class _Board:
    """The candidates while copies are placed on them. Mutable."""

    def __init__(self, candidates: list[Candidate]) -> None:
        self._candidates = {each.worker_id: each for each in candidates}
        self._num_copies = dict.fromkeys(self._candidates, 0)
        self._free_bytes = {each.worker_id: each.free_bytes for each in candidates}
        self._by_pools: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._holders: dict[str, list[str]] = {}
        for each in candidates:
            for model in each.holding:
                self._holders.setdefault(model, []).append(each.worker_id)

    def workers_of(self, pools: tuple[str, ...]) -> tuple[str, ...]:
        """Candidates of the pools, in name order."""
        found = self._by_pools.get(pools)
        if found is None:
            found = tuple(worker_id for worker_id, each in self._candidates.items() if each.pool in pools)
            self._by_pools[pools] = found
        return found

    def staying(self, demand: Demand) -> list[str]:
        """Holders that keep their copy: those of the lowest ranks."""
        holders = [
            (self._candidates[worker_id].holding[demand.model], worker_id)
            for worker_id in self._holders.get(demand.model, ())
            if self._candidates[worker_id].pool in demand.pools
        ]
        chosen = [worker_id for _, worker_id in sorted(holders)[: demand.num_copies]]
        for worker_id in chosen:
            self._num_copies[worker_id] += 1
        return chosen

    def add_copies(self, demand: Demand, chosen: list[str]) -> None:
        """Extends `chosen` to the number asked for, as far as there are workers."""
        assert demand.num_copies is not None, "models without a number of copies are known everywhere"
        num_missing = demand.num_copies - len(chosen)
        if num_missing <= 0:
            return
        others = [worker_id for worker_id in self.workers_of(demand.pools) if worker_id not in chosen]
        others.sort(key=lambda worker_id: self._preference(demand, worker_id))
        for worker_id in others[:num_missing]:
            chosen.append(worker_id)
            self._num_copies[worker_id] += 1
            free_bytes = self._free_bytes[worker_id]
            if free_bytes is not None:
                self._free_bytes[worker_id] = free_bytes - demand.num_bytes

    def _preference(self, demand: Demand, worker_id: str) -> tuple[int, int, int, str]:
        num_copies, free_bytes = self._num_copies[worker_id], self._free_bytes[worker_id]
        if demand.num_bytes == 0:
            return 1, 0, num_copies, worker_id
        if free_bytes is not None and free_bytes >= demand.num_bytes:
            return 0, free_bytes, num_copies, worker_id
        return 1, -(free_bytes or 0), num_copies, worker_id
