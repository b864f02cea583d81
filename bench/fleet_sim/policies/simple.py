"""Policies that know nothing of prefixes: turns and counts. Called by the fleet."""

from __future__ import annotations

from collections.abc import Sequence

from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.requests import Request


class RoundRobin(Policy):
    """One worker after the other; each router begins somewhere else."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._turns: dict[str, int] = {}

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The next in turn among those that have the model."""
        turn = self._turns.get(request.prompt.model, self.around.router)
        self._turns[request.prompt.model] = turn + 1
        return candidates[turn % len(candidates)]


class LeastLoad(Policy):
    """Fewest open requests of this router; one of equals by chance."""

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The least loaded one."""
        return self.around.least(candidates, lambda worker: self.around.in_flight[worker])
