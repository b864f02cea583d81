"""A simulated fleet: workers, who serves which model, and the requests. Called by the comparison and by scenarios."""

from __future__ import annotations

from collections.abc import Sequence

from bench.sim import checks
from bench.sim.catalog import ModelProfile
from bench.sim.clock import InvariantViolation, Simulation
from bench.sim.placement import HashRing, Placement
from bench.sim.requests import Request
from bench.sim.worker import SimWorker, WorkerSetup
from bench.sim.workload import Arrival

from naru_worker.core.hub.events import Ask
from naru_worker.core.hub.model import Tier

SETTLE_S = 4 * 3600.0
"""After the last arrival and command everything must be over within so long."""


class SimFleet:
    """Mutable."""

    def __init__(
        self,
        sim: Simulation,
        setups: Sequence[WorkerSetup],
        placement: Placement | None = None,
        *,
        times_decisions: bool = False,
    ) -> None:
        """`placement`: consistent hashing of the model's name by default."""
        self.sim = sim
        self.workers = [
            SimWorker(sim, f"worker-{index}", setup, times_decisions=times_decisions)
            for index, setup in enumerate(setups)
        ]
        self.requests: list[Request] = []
        self._placement = placement or HashRing([worker.name for worker in self.workers])
        self._places: dict[str, SimWorker] = {}
        sim.after_event = self._check

    def worker_of(self, model: str) -> SimWorker:
        """Who serves a model."""
        if model not in self._places:
            self._places[model] = self.workers[self._placement.place(model)]
        return self._places[model]

    def deploy(self, catalog: Sequence[ModelProfile], generation: int = 1) -> None:
        """Makes all models known to their workers; each comes up by its first request, or at once if it wishes so."""
        for profile in catalog:
            tier = Tier.ACTIVE if profile.wishes_active else Tier.COLD
            ask = Ask(profile.name, generation, profile.spec, tier, residency=profile.residency)
            self.worker_of(profile.name).ask(ask, profile)

    def put_on_disk(self, catalog: Sequence[ModelProfile]) -> None:
        """All images are on their worker's node already: what is measured is no download."""
        for profile in catalog:
            self.worker_of(profile.name).operations.on_disk.add(profile.footprint.weights_key)

    def send(self, arrivals: Sequence[Arrival], catalog: Sequence[ModelProfile]) -> None:
        """Plans requests, one after the other: each arrival plans the next one."""
        if arrivals:
            self.sim.at(arrivals[0].time_s, lambda: self._arrive(arrivals, 0, catalog))

    def settle(self) -> None:
        """Lets the rest happen without failures.

        Raises:
            InvariantViolation: a request hangs, or an operation does not end.
        """
        for worker in self.workers:
            worker.calm()
        self.sim.run(self.sim.now_s + SETTLE_S)
        for request in self.requests:
            if request.outcome is None:
                raise InvariantViolation(f"request {request.number} for {request.model} hangs: {request}")
        for worker in self.workers:
            checks.check_settled(worker)

    def _arrive(self, arrivals: Sequence[Arrival], index: int, catalog: Sequence[ModelProfile]) -> None:
        arrival = arrivals[index]
        if index + 1 < len(arrivals):
            self.sim.at(arrivals[index + 1].time_s, lambda: self._arrive(arrivals, index + 1, catalog))
        model = catalog[arrival.model].name
        request = Request(len(self.requests), model, self.sim.now_s, arrival.duration_s, arrival.max_wait_s)
        self.requests.append(request)
        self.worker_of(model).request(request)

    def _check(self) -> None:
        for worker in self.workers:
            if worker.is_touched:
                worker.check()
