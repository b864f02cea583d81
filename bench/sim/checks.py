"""What must hold of a worker's hub, whatever happens: compared with the truth and with the commands it accepted.

Called by the simulated worker after every event. Each check raises `InvariantViolation` with the numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.sim.clock import InvariantViolation

from naru_proto.errors import LoadError, NaruError, StaleCommand
from naru_worker.core.hub import actions, events
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.model import ModelEntry, Residency, Tier
from naru_worker.core.residency import ModelState

if TYPE_CHECKING:
    from bench.sim.worker import SimWorker

EPSILON_S = 1e-6


@dataclass(slots=True)
class Commands:
    """Mutable: what was accepted, to tell what may be refused and what may be done."""

    residency: dict[str, Residency] = field(default_factory=dict)
    newest: dict[str, events.Ask | events.Release] = field(default_factory=dict)
    asks: dict[str, events.Ask] = field(default_factory=dict)
    """The newest accepted one of each model that is not forgotten."""
    _generations: dict[str, int] = field(default_factory=dict)
    _specs: dict[str, Hashable] = field(default_factory=dict)
    """What the newest generation stands for, also when the model was forgotten since."""
    _tokens: dict[str, int] = field(default_factory=dict)
    _deadlines: dict[str, float] = field(default_factory=dict)
    """Before which no running request of a released model may be ended."""

    def is_stale(self, command: events.Ask | events.Release) -> bool:
        """A newer generation or fencing token was accepted."""
        is_older = command.generation < self._generations.get(command.model, 0)
        return is_older or 0 < command.fencing_token < self._tokens.get(command.model, 0)

    def accept(self, command: events.Ask | events.Release, now_s: float) -> None:
        """Notes a command the hub took."""
        model = command.model
        if self.is_stale(command):
            raise InvariantViolation(f"a stale command for {model} was accepted: {command}")
        is_newer = command.generation != self._generations.get(model)
        if is_newer and isinstance(command, events.Release) and command.tier is None:
            self._specs.pop(model, None)  # the older generation's
        self._generations[model] = command.generation
        self._tokens[model] = max(command.fencing_token, self._tokens.get(model, 0))
        self.newest[model] = command
        if isinstance(command, events.Ask):
            self.asks[model] = command
            self._specs[model] = command.spec
            self.residency[model] = command.residency
        else:
            self._deadlines[model] = now_s + command.drain_timeout_s
            if command.tier is None:
                self.asks.pop(model, None)

    def check_refusal(self, command: events.Ask | events.Release, error: NaruError, config: HubConfig) -> None:
        """A refusal has its cause, and says the right thing."""
        if isinstance(error, StaleCommand) != self.is_stale(command):
            raise InvariantViolation(f"{command} is refused with {error!r}")
        if isinstance(error, StaleCommand | LoadError):
            return
        is_other = isinstance(command, events.Ask) and self._specs.get(command.model, command.spec) != command.spec
        if not is_other or command.generation != self._generations[command.model]:
            raise InvariantViolation(f"{command} is refused without a cause: {error!r}")

    def check_drain(self, model: str, deadline_s: float) -> None:
        """Running requests are ended only where a release has said so, and not before its time."""
        allowed_s = self._deadlines.get(model)
        if allowed_s is None:
            raise InvariantViolation(f"{model} is drained with a deadline though nobody released it")
        if deadline_s < allowed_s - EPSILON_S:
            raise InvariantViolation(
                f"requests of {model} may run until {allowed_s}, and are to be ended at {deadline_s}"
            )

    def restart(self) -> list[events.Ask]:
        """Forgets what the hub forgets; what the control plane then asks for again."""
        wishes = list(self.asks.values())
        for table in (self.residency, self.newest, self.asks, self._generations, self._specs, self._tokens):
            table.clear()
        self._deadlines.clear()
        return wishes


def snapshot(entry: ModelEntry | None) -> tuple[Hashable, ...] | None:
    """What a refused command must not change. A name never heard of, and one without a wish, are the same."""
    if entry is None or (entry.generation == 0 and entry.spec is None):
        return None
    return (
        *(entry.generation, entry.fencing_token, entry.tier, entry.spec, entry.residency, entry.state),
        *(entry.attempt, entry.is_busy, entry.num_in_flight, entry.num_held),
    )


@dataclass(frozen=True, slots=True)
class Leaving:
    """A model on its way out, as it stood when that began."""

    began_s: float
    ready_s: float
    used_s: float


def check_eviction(action: actions.Changed, residency: Residency, leaving: Leaving | None) -> None:
    """No pinned model is evicted, and none that began to leave for others before its minimum residency was over."""
    if residency.pinned:
        raise InvariantViolation(f"{action.model} is pinned and evicted: {action.reason}")
    if not action.reason:
        raise InvariantViolation(f"{action.model} is evicted without a reason")
    if leaving is None or 0.0 < residency.idle_ttl_s <= leaving.began_s - leaving.used_s + EPSILON_S:
        return  # it leaves host memory, or the engine by itself
    stay_s = leaving.began_s - leaving.ready_s
    if stay_s < residency.min_residency_s - EPSILON_S:
        raise InvariantViolation(
            f"{action.model} is evicted after {stay_s} of {residency.min_residency_s} s: {action.reason}"
        )


def check_worker(worker: SimWorker, models: Iterable[str]) -> None:
    """The hub's books and states are those of the worker."""
    _check_bytes(worker)
    for model in models:
        _check_model(worker, model)


def _check_bytes(worker: SimWorker) -> None:
    truth, memory = worker.operations.truth, worker.hub.memory
    if worker.setup.is_strict:
        truth.recount()
    if memory.used_bytes > memory.budget_bytes and not worker.operations.is_refusing:
        raise InvariantViolation(f"{worker.name}: the hub books more than its budget: {memory}")
    if worker.kv.is_told and memory.used_bytes != truth.used_bytes:
        raise InvariantViolation(
            f"{worker.name}: the hub books {memory.used_bytes} bytes, {truth.used_bytes} are there"
        )
    if memory.host_bytes != truth.host_bytes:
        raise InvariantViolation(
            f"{worker.name}: the hub books {memory.host_bytes} host bytes, {truth.host_bytes} are there: "
            f"{sorted(truth.in_host)}"
        )


def _check_model(worker: SimWorker, model: str) -> None:
    entry, lane = worker.hub.entry(model), worker.lanes.get(model)
    num_running, num_held = (len(lane.running), len(lane.held)) if lane else (0, 0)
    if entry is None:
        if num_running or num_held:
            raise InvariantViolation(f"{worker.name}: {model} has requests and the hub does not know it")
        return
    if (entry.num_in_flight, entry.num_held) != (num_running, num_held):
        raise InvariantViolation(
            f"{worker.name}: {model} has {entry.num_in_flight} running and {entry.num_held} held requests for the hub, "
            f"there are {num_running} and {num_held}"
        )
    if entry.state.is_serving != (lane is not None and lane.is_open):
        raise InvariantViolation(
            f"{worker.name}: {model} is {entry.state.value} for the hub, and its engine says otherwise"
        )
    operation = worker.operations.under_way.get(model)
    if entry.is_busy != (operation is not None) or (operation is not None and operation.attempt != entry.attempt):
        raise InvariantViolation(
            f"{worker.name}: {model} is busy for the hub: {entry.is_busy}; under way is {operation}"
        )
    if num_held and not entry.is_wanted:
        raise InvariantViolation(f"{worker.name}: {num_held} requests wait for {model}, which is forgotten")


def check_settled(worker: SimWorker) -> None:
    """After everything is over nothing is left hanging, and models are where their last command wants them.

    One that was asked for may have failed, may have been evicted unless it is pinned, or may rest after a failure that
    trying again does not cure.
    """
    if worker.operations.under_way:
        raise InvariantViolation(f"{worker.name}: still under way: {worker.operations.under_way}")
    truth = worker.operations.truth
    for model, command in worker.commands.newest.items():
        entry = worker.hub.entry(model)
        is_there = model in truth.copies or model in truth.in_host
        if isinstance(command, events.Release):
            if command.tier is None and is_there:
                raise InvariantViolation(f"{worker.name}: {model} was to be forgotten and is in memory")
        elif command.tier is Tier.ACTIVE:
            assert entry is not None, "an asked model is known"
            is_excused = model in worker.given_up or (bool(entry.last_eviction) and not entry.residency.pinned)
            if not (entry.state.is_serving or entry.state is ModelState.FAILED or is_excused):
                raise InvariantViolation(f"{worker.name}: {model} is asked for and {entry.state.value}: {entry}")
