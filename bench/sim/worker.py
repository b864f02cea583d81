"""One simulated worker: the real hub, and everything around it in virtual time. It plays the worker's shell.

Called by the fleet with requests and commands. It carries out what the hub decides, tells it what happened, and after
every event checks the hub against what is really there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from bench.sim import checks
from bench.sim.catalog import ModelProfile
from bench.sim.clock import Event, InvariantViolation, Simulation
from bench.sim.kv import KVCaches
from bench.sim.machine import DEFAULT_MACHINE, NO_FAILURES, Failures, Machine
from bench.sim.operations import Operations
from bench.sim.requests import Lane, Outcome, Request
from bench.sim.truth import Phase

from naru_proto.errors import InvalidRequest, LoadError
from naru_worker.core.hub import actions, events
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.eviction import VictimChooser, choose_victims
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Residency
from naru_worker.core.residency import ModelState

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a simulated worker is made of."""

    config: HubConfig
    machine: Machine = DEFAULT_MACHINE
    failures: Failures = NO_FAILURES
    choose: VictimChooser = choose_victims
    make_hub: Callable[[HubConfig, VictimChooser], Hub] = Hub
    is_strict: bool = True
    """Everything is checked after every event, and not only what it touched."""


@dataclass(slots=True)
class Tally:
    """Mutable: what is counted over a worker's whole life, restarts included."""

    num_evictions: int = 0
    """From the engine; what leaves host memory does not count."""
    num_rejected: int = 0
    num_restarts: int = 0
    decision_s: list[tuple[float, float]] = field(default_factory=list)
    """Wall and CPU seconds of each of the hub's decisions, where they are timed."""
    wake_s: list[tuple[float, float]] = field(default_factory=list)
    """The same of each question when to wake it."""


class SimWorker:
    """Mutable."""

    def __init__(self, sim: Simulation, name: str, setup: WorkerSetup, *, times_decisions: bool = False) -> None:
        self.name = name
        self.setup = setup
        self.tally = Tally()
        self.given_up: set[str] = set()
        """Models with a failure that trying again does not cure, since they were last asked for."""
        self.lanes: dict[str, Lane] = {}
        self.commands = checks.Commands()
        self.operations = Operations(sim, setup.config, setup.machine, setup.failures, self.tell)
        self.kv = KVCaches(sim, self.operations, setup.config, self.tell)
        self.hub = setup.make_hub(setup.config, setup.choose)
        self._sim = sim
        self._profiles: dict[Hashable, ModelProfile] = {}
        self._loaded: dict[str, ModelProfile] = {}
        self._ready_s: dict[str, float] = {}
        self._leaving: dict[str, checks.Leaving] = {}
        self._wake: Event | None = None
        self._touched: set[str] = set()
        self._is_touched = False
        self._times_decisions = times_decisions

    # --- from outside

    def ask(self, ask: events.Ask, profile: ModelProfile) -> bool:
        """Asks for a model; False: the hub refused, which it may only where it must."""
        self._profiles[ask.spec] = profile
        return self._command(ask)

    def release(self, release: events.Release) -> bool:
        """Asks for a model to leave; False: the hub refused."""
        return self._command(release)

    def request(self, request: Request) -> None:
        """A request has come."""
        model = request.model
        entry = self.hub.entry(model)
        if entry is None or not entry.is_wanted:
            request.end(Outcome.FAILED, "the model is not known here", self._sim.now_s)
            return
        lane = self.lanes.setdefault(model, Lane())
        lane.last_used_s = self._sim.now_s
        if lane.is_open:
            request.found_loaded = True
            self._start(lane, request)
        else:
            lane.held[request.number] = request
            if request.max_wait_s != float("inf"):
                request.timer = self._sim.after(request.max_wait_s, lambda: self._expire(lane, request))
        self.tell(events.RequestArrived(model))

    def restart(self) -> None:
        """The process dies and comes back empty; the control plane asks again for what it had asked for."""
        self._sim.say(self.name, "restarts")
        self.tally.num_restarts += 1
        self.operations.restart()
        self.kv.restart()
        for lane in self.lanes.values():
            for request in (*lane.held.values(), *lane.running.values()):
                request.end(Outcome.FAILED, "the worker restarted", self._sim.now_s)
        self.lanes.clear()
        self._loaded.clear()
        self._ready_s.clear()
        self._leaving.clear()
        self._touched.clear()
        self.hub = self.setup.make_hub(self.setup.config, self.setup.choose)
        wishes = self.commands.restart()
        for ask in wishes:
            self._command(ask)

    def calm(self) -> None:
        """From now on nothing goes wrong any more."""
        self.operations.failures = NO_FAILURES

    @property
    def is_touched(self) -> bool:
        """Something has happened here since the last check."""
        return self._is_touched

    def check(self) -> None:
        """Compares the hub with the truth, as far as the last events touched it."""
        checks.check_worker(self, self.lanes if self.setup.is_strict else self._touched)
        self._touched.clear()
        self._is_touched = False

    # --- to the hub and back

    def tell(self, event: events.Result) -> None:
        """Gives the hub an event and carries out what it decides."""
        self._sim.say(self.name, "<-", event)
        self._is_touched = True
        if isinstance(event, events.Unloaded):
            self.kv.forget(event.model)
        if isinstance(event, events.Failed) and event.is_permanent:
            self.given_up.add(event.model)
        decided = self._timed(self.tally.decision_s, lambda: self.hub.handle(event, self._sim.now_s))
        model = getattr(event, "model", None)
        if model is not None:
            self._touched.add(model)
        self._carry_out(decided)

    def _command(self, command: events.Ask | events.Release) -> bool:
        self._sim.say(self.name, "<-", command)
        self._is_touched = True
        before = checks.snapshot(self.hub.entry(command.model))
        try:
            decided = self._timed(self.tally.decision_s, lambda: self._take(command))
        except (InvalidRequest, LoadError) as error:
            self._sim.say(self.name, "refused", type(error).__name__, error)
            self.commands.check_refusal(command, error, self.setup.config)
            if checks.snapshot(self.hub.entry(command.model)) != before:
                raise InvariantViolation(f"{self.name}: a refused command changed {command.model}") from error
            return False
        self.commands.accept(command, self._sim.now_s)
        self.given_up.discard(command.model)
        self._touched.add(command.model)
        self._carry_out(decided)
        return True

    def _take(self, command: events.Ask | events.Release) -> tuple[actions.Action, ...]:
        if isinstance(command, events.Ask):
            return self.hub.ask(command, self._sim.now_s)
        return self.hub.release(command, self._sim.now_s)

    def _timed(self, times_s: list[tuple[float, float]], call: Callable[[], _T]) -> _T:
        if not self._times_decisions:
            return call()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        result = call()
        times_s.append((time.perf_counter() - wall_s, time.thread_time() - cpu_s))
        return result

    def _carry_out(self, decided: tuple[actions.Action, ...]) -> None:
        for action in decided:
            self._sim.say(self.name, "->", action)
            self._touched.add(action.model)
            self._act(action)
        self._plan_wake()

    def _act(self, action: actions.Action) -> None:
        match action:
            case actions.Fetch():
                self.operations.fetch(action, self._wanted(action.model))
            case actions.RaiseToHost():
                self.operations.raise_to_host(action, self._wanted(action.model))
            case actions.Load():
                profile = self._loaded[action.model] = self._wanted(action.model)
                self.operations.load(action, profile, self.kv.unseen_bytes)
            case actions.Drain():
                self._drain(action)
            case actions.Unload():
                self._unload(action)
            case actions.DropHost():
                self.operations.drop_host(action)
            case actions.Stop():
                self.operations.stop(action)
            case actions.TrimKV():
                lane = self.lanes.get(action.model)
                self.kv.trim(action.model, action.num_bytes, len(lane.running) if lane else 0)
            case actions.RejectHeld():
                self._reject_held(action)
            case actions.Changed():
                self._note(action)

    def _wanted(self, model: str) -> ModelProfile:
        entry = self.hub.entry(model)
        if entry is None or entry.spec not in self._profiles:
            raise InvariantViolation(f"{self.name}: the hub works on {model}, which nobody asked for")
        return self._profiles[entry.spec]

    def _plan_wake(self) -> None:
        wake_s = self._timed(self.tally.wake_s, lambda: self.hub.next_wake_s(self._sim.now_s))
        if self._wake is not None and self._wake.call is not None:
            if self._wake.time_s == wake_s:
                return
            self._wake.cancel()
        self._wake = None
        if wake_s is not None:
            if wake_s < self._sim.now_s:
                raise InvariantViolation(f"{self.name}: the hub wants to be woken at {wake_s}, which is over")
            self._wake = self._sim.at(wake_s, lambda: self.tell(events.Tick()))

    # --- requests

    def _start(self, lane: Lane, request: Request) -> None:
        lane.running[request.number] = request
        request.started_s = self._sim.now_s
        if request.timer is not None:
            request.timer.cancel()
        request.timer = self._sim.after(request.duration_s, lambda: self._serve_end(lane, request))
        self.kv.grow(self._loaded[request.model], len(lane.running))

    def _serve_end(self, lane: Lane, request: Request) -> None:
        del lane.running[request.number]
        lane.last_used_s = self._sim.now_s
        request.end(Outcome.SERVED, "", self._sim.now_s)
        self.tell(events.RequestEnded(request.model))
        self._report_if_drained(request.model, lane)

    def _expire(self, lane: Lane, request: Request) -> None:
        del lane.held[request.number]
        request.end(Outcome.EXPIRED, "", self._sim.now_s)
        self.tell(events.RequestEnded(request.model, was_held=True))

    def _open(self, model: str) -> None:
        lane = self.lanes.setdefault(model, Lane())
        copy = self.operations.truth.copies.get(model)
        if copy is None or copy.phase is not Phase.LOADED:
            raise InvariantViolation(f"{self.name}: {model} is to serve, and is not loaded: {copy}")
        lane.is_open = True
        for request in lane.held.values():
            self._start(lane, request)
        lane.held.clear()

    def _reject_held(self, action: actions.RejectHeld) -> None:
        lane = self.lanes.setdefault(action.model, Lane())
        held = tuple(lane.held.values())
        lane.held.clear()
        self.tally.num_rejected += len(held)
        for request in held:
            request.end(Outcome.FAILED, action.reason, self._sim.now_s)

    # --- leaving

    def _drain(self, action: actions.Drain) -> None:
        model = action.model
        lane = self.lanes.setdefault(model, Lane())
        lane.is_open = False
        self._note_leaving(model, lane)
        self.operations.begin(model, actions.Drain, action.attempt)
        if action.timeout_s is not None:
            self.commands.check_drain(model, self._sim.now_s + action.timeout_s)
            self._sim.after(action.timeout_s, lambda: self._end_drain(lane, action))
        self._report_if_drained(model, lane)

    def _end_drain(self, lane: Lane, action: actions.Drain) -> None:
        operation = self.operations.under_way.get(action.model)
        if self.lanes.get(action.model) is not lane or operation is None or operation.attempt != action.attempt:
            return
        for request in tuple(lane.running.values()):
            del lane.running[request.number]
            request.end(Outcome.FAILED, "its model's drain time was over", self._sim.now_s)
            self.tell(events.RequestEnded(request.model))
        self._report_if_drained(action.model, lane)

    def _report_if_drained(self, model: str, lane: Lane) -> None:
        operation = self.operations.under_way.get(model)
        if lane.running or operation is None or operation.kind is not actions.Drain or operation.end is not None:
            return
        attempt = operation.attempt

        def drained() -> None:
            self.operations.finish(model, attempt)
            self.tell(events.Drained(model, attempt))

        operation.end = self._sim.after(0.0, drained)

    def _unload(self, action: actions.Unload) -> None:
        lane = self.lanes.setdefault(action.model, Lane())
        if lane.running:
            raise InvariantViolation(
                f"{self.name}: {action.model} is unloaded with {len(lane.running)} requests in flight"
            )
        lane.is_open = False
        self._note_leaving(action.model, lane)
        self.operations.unload(action)

    def _note_leaving(self, model: str, lane: Lane) -> None:
        if model in self._ready_s and model not in self._leaving:
            self._leaving[model] = checks.Leaving(self._sim.now_s, self._ready_s[model], lane.last_used_s)

    def _note(self, action: actions.Changed) -> None:
        model = action.model
        if action.new.is_serving and not action.old.is_serving:
            self._ready_s[model] = self._sim.now_s
            self._open(model)
        if action.is_eviction:
            self.tally.num_evictions += action.old is ModelState.DRAINING
            residency = self.commands.residency.get(model, Residency())
            checks.check_eviction(action, residency, self._leaving.get(model))
        if action.old is ModelState.DRAINING:
            self._ready_s.pop(model, None)
            self._leaving.pop(model, None)
