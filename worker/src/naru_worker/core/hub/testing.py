"""A worker in virtual time that does what the hub wants, after delays and with failures, and checks each step.

Used by tests. It has its own ledger and its own count of requests, and compares them with the hub's after each event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from naru_worker.core.hub.actions import (
    Action,
    Changed,
    Drain,
    DropHost,
    Fetch,
    Load,
    RaiseToHost,
    RejectHeld,
    Stop,
    TrimKV,
    Unload,
)
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import (
    Ask,
    BytesReturned,
    Drained,
    Failed,
    Fetched,
    HostDropped,
    HostReached,
    KVChanged,
    Loaded,
    Move,
    NoRoom,
    Release,
    RequestArrived,
    RequestEnded,
    Result,
    Stopped,
    Tick,
    Unloaded,
)
from naru_worker.core.hub.eviction import VictimChooser, choose_victims
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Footprint, Tier
from naru_worker.core.hub.testing_memory import Body, Chance, Luck, VirtualMemory
from naru_worker.core.residency import ModelState


class VirtualWorker(VirtualMemory):
    """One hub and all it drives. Not a model of speed: a model of what may happen, in which order."""

    def __init__(
        self,
        config: HubConfig,
        footprints: Mapping[str, Footprint] | Callable[[str], Footprint],
        *,
        chance: Chance,
        luck: Luck | None = None,
        choose: VictimChooser = choose_victims,
    ) -> None:
        super().__init__(config, Hub(config, choose), footprints)
        self.luck = luck or Luck()
        self.now_s = 0.0
        self.outcomes: dict[int, str] = {}
        """Request to 'served', 'rejected: why', 'cancelled' or 'cut'; absent while it lives."""
        self.log: list[tuple[float, Action]] = []
        self.failing: set[str] = set()
        """Models whose fetches fail whatever the luck."""
        self._chance = chance
        self._events: list[tuple[float, int, Callable[[], Result | None]]] = []
        self._num_events = 0
        self._num_requests = 0

    # --- from outside ---------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> None:
        """A command; refusals come out as they are."""
        self._carry_out(self.hub.ask(ask, self.now_s))

    def release(self, release: Release) -> None:
        """A command; refusals come out as they are."""
        actions = self.hub.release(release, self.now_s)
        self._body(release.model).was_released = True
        self._carry_out(actions)

    def move(self, move: Move) -> None:
        """A command; refusals come out as they are."""
        actions = self.hub.move(move, self.now_s)
        self._body(move.model).was_released |= move.tier is not Tier.ACTIVE
        self._carry_out(actions)

    def request(self, model: str, duration_s: float | None = None) -> int:
        """A request comes; its number."""
        self._num_requests += 1
        number = self._num_requests
        body = self._body(model)
        serving = self._state(model).is_serving
        if serving:
            self._run(model, number, duration_s)
        else:
            body.held.append(number)
        self.tell(RequestArrived(model))
        return number

    def cancel(self, model: str, number: int) -> None:
        """The client leaves."""
        body = self._body(model)
        if number in body.held:
            body.held.remove(number)
            self.outcomes[number] = "cancelled"
            self.tell(RequestEnded(model, was_held=True))
        elif number in body.running:
            self._end(model, number, "cancelled")

    def run(self, seconds: float) -> None:
        """Everything that happens within this time."""
        until_s = self.now_s + seconds
        while self._step(until_s):
            pass
        self.now_s = until_s

    def run_until_quiet(self, limit_s: float = 10_000.0) -> None:
        """Until nothing is under way and no time matters, or the limit."""
        until_s = self.now_s + limit_s
        while self._step(until_s):
            pass

    # --- one step -------------------------------------------------------------------------------------------------

    def _step(self, until_s: float) -> bool:
        wake_s = self.hub.next_wake_s(self.now_s)
        event_s = self._events[0][0] if self._events else None
        due = [time_s for time_s in (wake_s, event_s) if time_s is not None and time_s <= until_s]
        if not due:
            return False
        self.now_s = max(self.now_s, min(due))
        if event_s is not None and event_s <= self.now_s:
            event = heapq.heappop(self._events)[2]()
            if event is not None:
                self.tell(event)
        else:
            self.tell(Tick())
            again_s = self.hub.next_wake_s(self.now_s)
            assert again_s is None or again_s > self.now_s, "a Tick leaves nothing that is due already"
        return True

    def tell(self, event: Result) -> None:
        """An event, now; what the hub wants of it is done."""
        self._carry_out(self.hub.handle(event, self.now_s))

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self.log.append((self.now_s, action))
            self._do(action)
        self.check()

    def _later(self, delay_s: float, event: Callable[[], Result | None]) -> None:
        factor = 1.0 + self.luck.jitter * (2.0 * self._chance.random() - 1.0)
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + delay_s * factor, self._num_events, event))

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self._chance.random() < probability

    def _body(self, model: str) -> Body:
        return self.bodies.setdefault(model, Body())

    def _state(self, model: str) -> ModelState:
        return self.states.get(model, ModelState.COLD)

    # --- actions --------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        body = self._body(action.model)
        match action:
            case Changed():
                assert action.old is self._state(action.model) and action.new is not action.old, action
                self.states[action.model] = action.new
                if action.old is ModelState.LOADING and action.new.is_serving:
                    body.was_released = False
                    for number in body.held:
                        self._run(action.model, number)
                    body.held.clear()
            case RejectHeld():
                for number in body.held:
                    self.outcomes[number] = f"rejected: {action.reason}"
                body.held.clear()
            case Stop():
                assert body.operation is not None and not body.stop_told, action
                assert action.attempt == self._attempt(action.model), action
                body.stop_told = True
            case TrimKV():
                self._later(self.luck.load_s / 5, lambda: self._trim(action))
            case Drain():
                self._drain(action, body)
            case Fetch() | RaiseToHost() | Load() | Unload() | DropHost():
                self._begin(action, body)

    def _attempt(self, model: str) -> int:
        entry = self.hub.entry(model)
        assert entry is not None
        return entry.attempt

    def _begin(self, action: Fetch | RaiseToHost | Load | Unload | DropHost, body: Body) -> None:
        assert body.operation is None, f"{action} while {body.operation} is under way"
        body.operation = action
        body.stop_told = False
        luck = self.luck
        match action:
            case Fetch():
                self._later(luck.fetch_s, lambda: self._end_fetch(action))
            case RaiseToHost():
                self._later(luck.load_s, lambda: self._end_raise(action))
            case Load():
                self._begin_load(action, body)
            case Unload():
                assert body.is_loaded and body.is_draining and not body.running, f"{action} of a model in use"
                self._later(luck.unload_s, lambda: self._end_unload(action))
            case DropHost():
                assert body.in_host and not body.is_loaded, action
                self._later(luck.unload_s, lambda: self._end_drop(action))

    def _end_fetch(self, action: Fetch) -> Result:
        body = self._finish(action)
        if body.stop_told and not self._happens(self.luck.stop_is_late):
            return Stopped(action.model, action.attempt)
        if action.model in self.failing or self._happens(self.luck.fetch_fails):
            return Failed(action.model, action.attempt, "no such file", self._happens(self.luck.failure_is_permanent))
        return Fetched(action.model, action.attempt, self.footprint(action.model))

    def _end_raise(self, action: RaiseToHost) -> Result:
        body = self._finish(action)
        if body.stop_told and not self._happens(self.luck.stop_is_late):
            return Stopped(action.model, action.attempt)
        if self._happens(self.luck.load_fails):
            return Failed(action.model, action.attempt, "no host memory")
        body.in_host = True
        return HostReached(action.model, action.attempt)

    def _begin_load(self, action: Load, body: Body) -> None:
        footprint = self.footprint(action.model)
        need_bytes = self.need_bytes(action.model, footprint)
        assert action.num_bytes == need_bytes, f"{action}, but {need_bytes} bytes are to be booked"
        free_bytes = self.config.budget_bytes - self.used_bytes
        if need_bytes > free_bytes:
            self.refused_loads.add(action.model)
            self._later(self.luck.load_s / 10, lambda: self._refuse(action, free_bytes))
            return
        body.footprint = footprint
        body.kv_bytes = footprint.kv_floor_bytes
        self._later(self.luck.load_s, lambda: self._end_load(action))

    def _refuse(self, action: Load, free_bytes: int) -> Result:
        self._finish(action)
        self.refused_loads.discard(action.model)
        return NoRoom(action.model, action.attempt, free_bytes)

    def _end_load(self, action: Load) -> Result:
        body = self._finish(action)
        if body.stop_told and not self._happens(self.luck.stop_is_late):
            self._clear(body)
            return Stopped(action.model, action.attempt)
        if body.in_host and self._happens(self.luck.wake_fails):
            self._leave_engine(body)
            return Failed(action.model, action.attempt, "no room on the device", is_in_host=True)
        if self._happens(self.luck.load_fails):
            kept_bytes = self._keep_bytes(body.kv_bytes)
            self._clear(body)
            return Failed(action.model, action.attempt, "damaged image", False, kept_bytes)
        body.is_loaded, body.is_draining, body.in_host = True, False, False
        body.asleep_bytes = 0
        assert body.footprint is not None
        self.workspace_bytes = max(self.workspace_bytes, body.footprint.workspace_bytes)
        return Loaded(action.model, action.attempt, self.luck.load_s)

    def _end_unload(self, action: Unload) -> Result:
        body = self._finish(action)
        held_bytes, footprint = body.kv_bytes, body.footprint
        assert footprint is not None, "it was loaded"
        self._clear(body)
        body.in_host = action.keep_host and not self._happens(self.luck.not_kept)
        body.asleep_bytes = footprint.asleep_bytes if body.in_host else 0
        not_kept = "no slot was free" if action.keep_host and not body.in_host else ""
        return Unloaded(action.model, action.attempt, self._keep_bytes(held_bytes), not_kept=not_kept)

    def _end_drop(self, action: DropHost) -> Result:
        body = self._finish(action)
        body.in_host, body.asleep_bytes = False, 0
        return HostDropped(action.model, action.attempt)

    def _drain(self, action: Drain, body: Body) -> None:
        assert body.operation is None or isinstance(body.operation, Drain), f"{action} while {body.operation} goes on"
        entry = self.hub.entry(action.model)
        assert entry is not None
        assert action.timeout_s is None or body.was_released, f"{action}, but nobody released it"
        is_wanted = entry.is_wanted and entry.tier.name == "ACTIVE" and entry.loaded_spec == entry.spec
        assert not (entry.residency.pinned and is_wanted), f"{action} of a pinned model"
        body.operation = action
        body.is_draining = True
        if action.timeout_s is not None:
            self._later(action.timeout_s, lambda: self._cut(action))
        self._later(0.001, lambda: self._drained_if_empty(action.model))

    def _cut(self, action: Drain) -> None:
        body = self._body(action.model)
        if body.operation is action:
            for number in tuple(body.running):
                self._end(action.model, number, "cut")

    def _drained_if_empty(self, model: str) -> Result | None:
        body = self._body(model)
        if not isinstance(body.operation, Drain) or body.running:
            return None
        attempt = body.operation.attempt
        body.operation = None
        return Drained(model, attempt)

    def _trim(self, action: TrimKV) -> Result:
        body = self._body(action.model)
        if body.is_loaded and body.footprint is not None:
            in_use_bytes = body.footprint.kv_floor_bytes + len(body.running)
            body.kv_bytes -= min(action.num_bytes, max(0, body.kv_bytes - in_use_bytes))
        return KVChanged({action.model: body.kv_bytes})

    def _finish(self, action: Action) -> Body:
        body = self._body(action.model)
        assert body.operation is action, f"{action} ends, but {body.operation} is under way"
        body.operation = None
        return body

    def _clear(self, body: Body) -> None:
        body.in_host, body.asleep_bytes = False, 0
        self._leave_engine(body)

    def _leave_engine(self, body: Body) -> None:
        body.is_loaded = body.is_draining = False
        body.footprint = None
        body.kv_bytes = 0

    def _keep_bytes(self, held_bytes: int) -> int:
        if held_bytes == 0 or not self._happens(self.luck.keeps_bytes):
            return 0
        self.unreturned_bytes += held_bytes
        self._later(5.0, lambda: self._give_back(held_bytes))
        return held_bytes

    def _give_back(self, num_bytes: int) -> Result:
        self.unreturned_bytes -= num_bytes
        return BytesReturned(num_bytes)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _run(self, model: str, number: int, duration_s: float | None = None) -> None:
        body = self._body(model)
        assert body.is_loaded and not body.is_draining, f"a request for {model!r} reaches no engine"
        body.running[number] = self.now_s
        self._later(self.luck.request_s if duration_s is None else duration_s, lambda: self._served(model, number))

    def _served(self, model: str, number: int) -> None:
        body = self._body(model)
        if number not in body.running:
            return
        if self._happens(self.luck.kv_grows):
            growth_bytes = 1 + int(self._chance.random() * self.config.budget_bytes / 10)
            if self.used_bytes + growth_bytes <= self.config.budget_bytes:
                body.kv_bytes += growth_bytes
                self._later(self.luck.load_s / 5, lambda: KVChanged({model: body.kv_bytes}))
        self._end(model, number, "served")

    def _end(self, model: str, number: int, outcome: str) -> None:
        body = self._body(model)
        del body.running[number]
        self.outcomes[number] = outcome
        self.tell(RequestEnded(model))
        if isinstance(body.operation, Drain) and not body.running:
            self._later(0.001, lambda: self._drained_if_empty(model))
