"""What a routing policy is in the simulator: the protocol, and what a router that uses one can see.

Called by the fleet: one policy object for each router, so that routers know of each other what a policy tells them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.fleet_sim.engine import Engine
from bench.fleet_sim.reports import Report
from bench.fleet_sim.requests import Request


@dataclass(slots=True)
class Board:
    """Mutable: requests in flight by router and worker, and how they stood at the last tick of a shared board."""

    in_flight: list[list[int]]
    tick_s: float = 0.1
    """How often routers that share counts over a store write and read them."""
    _shared: list[list[int]] = field(default_factory=list)
    _num_ticks: int = -1

    def advance(self, now_s: float) -> None:
        """Called before any count changes: between changes the counts at a tick are those of now."""
        num_ticks = int(now_s / self.tick_s)
        if num_ticks != self._num_ticks:
            self._num_ticks = num_ticks
            self._shared = [list(counts) for counts in self.in_flight]

    def shared(self, router: int, worker: int) -> int:
        """A router's own count now and those of the others at the last tick."""
        others = sum(counts[worker] for index, counts in enumerate(self._shared) if index != router)
        return self.in_flight[router][worker] + others


@dataclass(frozen=True, slots=True)
class Surroundings:
    """One router's place in the fleet."""

    router: int
    engines: Sequence[Engine]
    board: Board
    rng: random.Random
    network_s: float
    """One way between router and worker."""
    shared: dict[str, Any]
    """Of all routers of the fleet: for the oracle alone."""

    @property
    def in_flight(self) -> list[int]:
        """This router's own open requests by worker."""
        return self.board.in_flight[self.router]

    def pushed(self, worker: int, now_s: float) -> Report:
        """A worker's load as it tells it by itself."""
        return self.engines[worker].reports.at(now_s - self.network_s)

    def scraped(self, worker: int, now_s: float, period_s: float) -> Report:
        """A worker's load as it was when it was last asked, which happens every `period_s`."""
        return self.engines[worker].reports.at(int(now_s / period_s) * period_s - self.network_s)

    def least(self, candidates: Sequence[int], cost: Callable[[int], float]) -> int:
        """The candidate of least cost; one of equals by chance."""
        costs = {worker: cost(worker) for worker in candidates}
        best = min(costs.values())
        return self.rng.choice([worker for worker, value in costs.items() if value == best])


class Policy:
    """Chooses workers for one router. The base class of all policies: what need not be told is not listened to."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The worker, out of at least one."""
        raise NotImplementedError

    def on_first_token(self, request: Request, now_s: float) -> None:
        """A request of this router has begun to answer."""

    def on_end(self, request: Request, now_s: float) -> None:
        """A request of this router has ended."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A policy by name."""

    name: str
    make: Callable[[Surroundings], Policy]
