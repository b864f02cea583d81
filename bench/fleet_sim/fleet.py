"""A simulated fleet: routers, each with its own policy object, in front of engines. Called by the comparison.

A request comes to a router by chance, as behind a load balancer; the router's policy chooses among the workers that
have the model. A conversation's next turn follows its answer.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.fleet_sim.engine import Engine
from bench.fleet_sim.machines import Machine
from bench.fleet_sim.policies.policy import Board, Kind, Policy, Surroundings
from bench.fleet_sim.prompts import RouteKey
from bench.fleet_sim.requests import Request, Session
from bench.sim.clock import InvariantViolation, Simulation

NETWORK_S = 0.0005


@dataclass(frozen=True, slots=True)
class Setup:
    """What a fleet is made of."""

    machine: Machine
    num_workers: int
    places: Mapping[str, tuple[int, ...]]
    """Workers that have each model."""
    key_of_block: Mapping[int, RouteKey]
    num_routers: int = 2
    network_s: float = NETWORK_S


class Fleet:
    """Mutable."""

    def __init__(self, setup: Setup, kind: Kind, seed: int) -> None:
        self.setup = setup
        self.sim = Simulation(seed)
        self.requests: list[Request] = []
        self.imbalances: list[float] = []
        """Most requests in flight on a worker ÷ their mean, at each arrival that finds as many as workers."""
        self.board = Board([[0] * setup.num_workers for _ in range(setup.num_routers)])
        self.engines = [
            Engine(self.sim, f"worker-{index}", setup.machine, setup.key_of_block, self._first_token, self._end)
            for index in range(setup.num_workers)
        ]
        shared: dict[str, object] = {}
        self.policies: list[Policy] = [
            kind.make(
                Surroundings(
                    *(index, self.engines, self.board, random.Random(seed * 1000 + index), setup.network_s, shared)
                )
            )
            for index in range(setup.num_routers)
        ]
        self.end_s = 0.0
        """From then on no request comes."""
        self._after: dict[int, tuple[Session, int]] = {}
        self._next_router = random.Random(seed)

    def run(self, sessions: Sequence[Session], sessions_per_s: float, lead_s: float, num_gaps: float) -> None:
        """Plays sessions for `num_gaps` mean gaps between them, and what has begun then to its end.

        Those of the `lead_s` before that are under way at the beginning: they come in with the turn that is due then,
        so that requests come at their full rate from the first second on.

        Raises:
            InvariantViolation: a request did not end, or there are too few sessions.
        """
        self.end_s = num_gaps / sessions_per_s
        if sessions[-1].start / sessions_per_s < lead_s + self.end_s:
            raise InvariantViolation(f"{len(sessions)} sessions are too few for {lead_s + self.end_s:.0f} s")
        token_s = self.setup.machine.decode_step_s(self.setup.machine.max_sequences // 2)
        for session in sessions:
            time_s = session.start / sessions_per_s - lead_s
            index = 0
            while time_s < 0.0 and index < len(session.turns):
                time_s += session.turns[index].num_answer_tokens * token_s
                index += 1
                time_s += session.turns[index].think_s if index < len(session.turns) else 0.0
            if index < len(session.turns) and time_s <= self.end_s:
                self.sim.at(time_s, functools.partial(self._arrive, session, index))
        self.sim.run()
        for request in self.requests:
            if request.ended_s <= 0.0:
                raise InvariantViolation(f"request {request.number} did not end")
        for engine in self.engines:
            if engine.cache.num_held or engine.num_waiting_tokens:
                raise InvariantViolation(f"{engine.name} holds {engine.cache.num_held} blocks after all requests")

    def _arrive(self, session: Session, index: int) -> None:
        now_s, turn = self.sim.now_s, session.turns[index]
        router = self._next_router.randrange(self.setup.num_routers)
        request = Request(len(self.requests), turn, router, now_s)
        self.requests.append(request)
        self._after[request.number] = (session, index + 1)
        self.board.advance(now_s)
        self._note_imbalance()
        candidates = self.setup.places[turn.prompt.model]
        request.worker = self.policies[router].choose(request, candidates, now_s)
        if request.worker not in candidates:
            raise InvariantViolation(f"request {request.number} went to worker {request.worker}, not in {candidates}")
        self.board.in_flight[router][request.worker] += 1
        engine = self.engines[request.worker]
        self.sim.after(self.setup.network_s, lambda: engine.arrive(request))

    def _note_imbalance(self) -> None:
        counts = [sum(column) for column in zip(*self.board.in_flight, strict=True)]
        if sum(counts) >= len(counts):
            self.imbalances.append(max(counts) * len(counts) / sum(counts))

    def _first_token(self, request: Request) -> None:
        self.policies[request.router].on_first_token(request, self.sim.now_s)

    def _end(self, request: Request) -> None:
        self.board.advance(self.sim.now_s)
        self.board.in_flight[request.router][request.worker] -= 1
        self.policies[request.router].on_end(request, self.sim.now_s)
        session, index = self._after.pop(request.number)
        if index < len(session.turns) and self.sim.now_s + session.turns[index].think_s <= self.end_s:
            self.sim.after(session.turns[index].think_s, functools.partial(self._arrive, session, index))
