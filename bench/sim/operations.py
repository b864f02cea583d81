"""Carries out the hub's actions on models in virtual time: fetch, host, load, unload, stop, trim. It may go wrong.

Called by the simulated worker for each action; it reports each result through one callback. Requests are not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.catalog import ModelProfile
from bench.sim.clock import Event, InvariantViolation, Simulation
from bench.sim.machine import Failures, Machine
from bench.sim.truth import Truth

from naru_worker.core.hub import actions, events
from naru_worker.core.hub.config import HubConfig

DISK_HIT_S = 0.002
"""A fetch of what the node has."""
STOP_S = 0.01

Kind = type[actions.Fetch | actions.RaiseToHost | actions.Load | actions.Drain | actions.Unload | actions.DropHost]


OperationEnd = (
    events.Fetched
    | events.HostReached
    | events.NoRoom
    | events.Loaded
    | events.Failed
    | events.Stopped
    | events.Unloaded
    | events.HostDropped
)


@dataclass(slots=True, eq=False)
class Operation:
    """One operation under way."""

    kind: Kind
    attempt: int
    end: Event | None = None
    """When it is over; None: it ends by other events."""


class Operations:
    """Mutable: what is under way on one worker, and its memory."""

    def __init__(
        self,
        sim: Simulation,
        config: HubConfig,
        machine: Machine,
        failures: Failures,
        report: Callable[[events.Result], None],
    ) -> None:
        self.truth = Truth(config.budget_bytes, config.host_budget_bytes)
        self.under_way: dict[str, Operation] = {}
        self.on_disk: set[str] = set()
        """Identities of images the node has; a restart keeps them."""
        self.failures = failures
        self.is_refusing = False
        """A load found no room, and the hub does not know yet."""
        self.num_loads = 0
        self.loaded_bytes = 0
        self._sim = sim
        self._config = config
        self._machine = machine
        self._report = report

    def restart(self) -> None:
        """The process is gone and back: nothing is under way and nothing in memory."""
        for operation in self.under_way.values():
            if operation.end is not None:
                operation.end.cancel()
        self.under_way.clear()
        self.is_refusing = False
        peak_bytes = self.truth.peak_bytes
        self.truth = Truth(self._config.budget_bytes, self._config.host_budget_bytes)
        self.truth.peak_bytes = peak_bytes

    def begin(self, model: str, kind: Kind, attempt: int) -> Operation:
        """Notes an operation. A drain may take the place of an earlier drain.

        Raises:
            InvariantViolation: another one of this model is under way, or too many of its kind.
        """
        other = self.under_way.get(model)
        if other is not None and not other.kind is kind is actions.Drain:
            raise InvariantViolation(f"{kind.__name__} of {model} begins beside its {other.kind.__name__}")
        if other is not None and other.end is not None:
            other.end.cancel()
        operation = self.under_way[model] = Operation(kind, attempt)
        loads = (actions.RaiseToHost, actions.Load)
        for kinds, limit in (((actions.Fetch,), self._config.max_fetches), (loads, self._config.max_loads)):
            count = sum(other.kind in kinds for other in self.under_way.values()) if kind in kinds else 0
            if count > limit:
                raise InvariantViolation(f"{count} of {[k.__name__ for k in kinds]} at once; the limit is {limit}")
        return operation

    def finish(self, model: str, attempt: int) -> None:
        """An operation is over."""
        operation = self.under_way.pop(model)
        assert operation.attempt == attempt, "the simulator mixes up attempts"

    def fetch(self, action: actions.Fetch, profile: ModelProfile) -> None:
        """Files onto the node."""
        model, attempt = action.model, action.attempt
        is_here = profile.footprint.weights_key in self.on_disk
        duration_s = DISK_HIT_S if is_here else self._machine.fetch_s(profile)

        def done() -> None:
            self.on_disk.add(profile.footprint.weights_key)
            self._over(events.Fetched(model, attempt, profile.footprint))

        self._start(model, actions.Fetch, attempt, duration_s, 0.0 if is_here else self.failures.fetch, done)

    def raise_to_host(self, action: actions.RaiseToHost, profile: ModelProfile) -> None:
        """Image into host memory; its bytes count from the first one on."""
        model, attempt = action.model, action.attempt
        self.truth.enter_host(model, profile.footprint)
        self._start(
            model,
            actions.RaiseToHost,
            attempt,
            self._machine.host_s(profile),
            self.failures.host,
            lambda: self._over(events.HostReached(model, attempt)),
            lambda: self.truth.leave_host(model),
        )

    def load(self, action: actions.Load, profile: ModelProfile, unseen_bytes: int) -> None:
        """Image into the engine. `unseen_bytes`: KV growth the hub has not been told of yet.

        Raises:
            InvariantViolation: the hub books other bytes than the load takes, or more than there are.
        """
        model, attempt = action.model, action.attempt
        need_bytes = self.truth.need_bytes(profile.footprint)
        if action.num_bytes != need_bytes:
            raise InvariantViolation(
                f"the load of {model} is booked at {action.num_bytes} bytes and takes {need_bytes}"
            )
        if need_bytes > self.truth.free_bytes:
            if need_bytes > self.truth.free_bytes + unseen_bytes:
                raise InvariantViolation(
                    f"the load of {model} takes {need_bytes} bytes, free are {self.truth.free_bytes}, and the hub knew"
                )
            self._refuse(action)
            return
        is_in_host = model in self.truth.in_host
        self.truth.begin_load(model, profile.footprint)
        duration_s = self._machine.load_s(profile, is_in_host=is_in_host)
        self.num_loads += 1
        self.loaded_bytes += profile.footprint.weight_bytes

        def done() -> None:
            self.truth.end_load(model)
            self._over(events.Loaded(model, attempt, duration_s))

        if self.failures.hang and self._sim.random.random() < self.failures.hang:
            timeout_s = self.failures.load_timeout_s
            self._start(
                model,
                actions.Load,
                attempt,
                timeout_s,
                1.0,
                done,
                lambda: self.truth.fail_load(model),
                "timed out",
            )
            return
        self._start(
            model,
            actions.Load,
            attempt,
            duration_s,
            self.failures.load,
            done,
            lambda: self._lose(model),
            "load broke off",
        )

    def unload(self, action: actions.Unload) -> None:
        """Model out of the engine. Its bytes count until the end."""
        model, attempt = action.model, action.attempt
        rng = self._sim.random
        is_slow = bool(self.failures.slow_unload) and rng.random() < self.failures.slow_unload
        operation = self.begin(model, actions.Unload, attempt)
        self.truth.begin_unload(model, keep_host=action.keep_host)

        def done() -> None:
            unreturned_bytes = self._draw_unreturned(model)
            self.truth.end_unload(model, unreturned_bytes)
            self._return_later(unreturned_bytes)
            error = "the engine still holds bytes" if unreturned_bytes else ""
            self._over(events.Unloaded(model, attempt, unreturned_bytes, error))

        operation.end = self._sim.after(self.failures.slow_unload_s if is_slow else self._machine.fixed_s, done)

    def drop_host(self, action: actions.DropHost) -> None:
        """Image out of host memory."""
        model, attempt = action.model, action.attempt
        operation = self.begin(model, actions.DropHost, attempt)

        def done() -> None:
            self.truth.leave_host(model)
            self._over(events.HostDropped(model, attempt))

        operation.end = self._sim.after(0.001, done)

    def stop(self, action: actions.Stop) -> None:
        """Breaks off a fetch, a read or a load, unless it ends first. What cannot be broken off ends by itself."""
        model = action.model
        operation = self.under_way.get(model)
        if operation is None or operation.attempt != action.attempt:
            raise InvariantViolation(f"Stop aims at attempt {action.attempt} of {model}, which is not under way")
        if operation.kind not in (actions.Fetch, actions.RaiseToHost, actions.Load) or operation.end is None:
            return
        if operation.end.time_s <= self._sim.now_s + STOP_S:
            return
        operation.end.cancel()

        def stopped() -> None:
            if operation.kind is actions.RaiseToHost:
                self.truth.leave_host(model)
            if operation.kind is actions.Load:
                self.truth.fail_load(model)
            self._over(events.Stopped(model, action.attempt))

        operation.end = self._sim.after(STOP_S, stopped)

    def _start(
        self,
        model: str,
        kind: Kind,
        attempt: int,
        duration_s: float,
        chance: float,
        done: Callable[[], None],
        lost: Callable[[], int | None] = lambda: None,
        error: str = "broken off",
    ) -> None:
        """Plans the end of an operation: `done`, or with a chance its failure after `lost` has freed what it held."""
        rng = self._sim.random
        operation = self.begin(model, kind, attempt)
        end_s, has_failed = self.failures.draw_end(chance, duration_s, rng)
        is_permanent = has_failed and rng.random() < self.failures.is_permanent

        def failed() -> None:
            unreturned_bytes = lost() or 0
            self._return_later(unreturned_bytes)
            self._over(events.Failed(model, attempt, error, is_permanent, unreturned_bytes))

        operation.end = self._sim.after(end_s, failed if has_failed else done)

    def _refuse(self, action: actions.Load) -> None:
        free_bytes = self.truth.free_bytes
        self.is_refusing = True

        def refused() -> None:
            self.is_refusing = False
            self._over(events.NoRoom(action.model, action.attempt, free_bytes))

        self.begin(action.model, actions.Load, action.attempt).end = self._sim.after(0.0, refused)

    def _over(self, event: OperationEnd) -> None:
        self.finish(event.model, event.attempt)
        self._report(event)

    def _lose(self, model: str) -> int:
        unreturned_bytes = self._draw_unreturned(model)
        self.truth.fail_load(model, unreturned_bytes)
        return unreturned_bytes

    def _draw_unreturned(self, model: str) -> int:
        rng = self._sim.random
        if self.failures.unreturned and rng.random() < self.failures.unreturned:
            return int(self.truth.returnable_bytes(model) * rng.random())
        return 0

    def _return_later(self, num_bytes: int) -> None:
        if num_bytes == 0 or self._sim.random.random() < self.failures.never_returned:
            return
        truth = self.truth

        def returned() -> None:
            if self.truth is truth:  # a restart returns everything
                truth.give_back(num_bytes)
                self._report(events.BytesReturned(num_bytes))

        self._sim.after(1.0 + 10.0 * self._sim.random.random(), returned)
