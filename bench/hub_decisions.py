"""How long the hub thinks: its state machine alone, with many known models and a Zipf stream of requests.

Called by `hub`. Runs in this process, without engines: what the hub wants done is answered at once as done. Only calls
of the hub are timed.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.hub_workload import zipf_sequence
from bench.stats import percentile

from naru_worker.core.hub import actions, events
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.hub import Hub
from naru_worker.core.hub.model import Footprint, Tier

MODEL_BYTES = 100 * 10**6
KV_FLOOR_BYTES = 4 * 10**6
WORKSPACE_BYTES = 20 * 10**6
LOAD_S = 0.03
REQUEST_GAP_S = 0.002
"""Virtual time between two requests."""
NUM_OPEN = 32
"""Requests in flight; beyond that the oldest one ends before the next comes."""
TICK_EVERY = 50
"""Requests between two ticks."""


@dataclass(frozen=True, slots=True)
class DecisionFigures:
    """Seconds per call of the hub."""

    decision_p50_s: float
    decision_p99_s: float
    decision_p999_s: float
    decision_max_s: float
    by_call_p99_s: dict[str, float]
    """By kind of event."""
    num_calls: int
    num_known: int
    num_resident: int
    """In memory at the end."""
    num_loads: int
    num_evictions: int
    ask_p99_s: float
    """Naming a model to the hub, before the stream."""


class DecisionError(Exception):
    """The hub did what it has no reason to do here: there is always an idle model that can leave."""


class _Driver:
    """Feeds a hub, carries nothing out, and keeps the time of every call."""

    def __init__(self, hub: Hub, footprints: dict[str, Footprint]) -> None:
        self._hub = hub
        self._footprints = footprints
        self.now_s = 0.0
        self.taken_ns: dict[str, list[int]] = collections.defaultdict(list)
        self.num_loads = 0
        self.num_evictions = 0

    def ask(self, name: str) -> None:
        """Names a model, cold."""
        ask = events.Ask(name, generation=1, spec=name, tier=Tier.COLD)
        started_ns = time.perf_counter_ns()
        wanted = self._hub.ask(ask, self.now_s)
        self.taken_ns["Ask"].append(time.perf_counter_ns() - started_ns)
        self._follow(wanted)

    def tell(self, event: events.Result) -> None:
        """One event, and the results of all that follows from it."""
        self._follow(self._handle(event))

    def _handle(self, event: events.Result) -> tuple[actions.Action, ...]:
        started_ns = time.perf_counter_ns()
        wanted = self._hub.handle(event, self.now_s)
        self.taken_ns[type(event).__name__].append(time.perf_counter_ns() - started_ns)
        return wanted

    def _follow(self, wanted: tuple[actions.Action, ...]) -> None:
        left = collections.deque(wanted)
        while left:
            event = self._result(left.popleft())
            if event is not None:
                left.extend(self._handle(event))

    def _result(self, action: actions.Action) -> events.Result | None:
        """What a shell would report once the action is carried out; None: nothing."""
        match action:
            case actions.Fetch(model, attempt):
                return events.Fetched(model, attempt, self._footprints[model])
            case actions.RaiseToHost(model, attempt):
                return events.HostReached(model, attempt)
            case actions.Load(model, attempt):
                self.num_loads += 1
                return events.Loaded(model, attempt, LOAD_S)
            case actions.Stop(model, attempt):
                return events.Stopped(model, attempt)
            case actions.Drain(model, attempt):
                entry = self._hub.entry(model)
                if entry is not None and entry.num_in_flight:
                    raise DecisionError(f"the hub drains {model} with {entry.num_in_flight} requests in flight")
                return events.Drained(model, attempt)
            case actions.Unload(model, attempt):
                return events.Unloaded(model, attempt)
            case actions.DropHost(model, attempt):
                return events.HostDropped(model, attempt)
            case actions.TrimKV(model):
                return events.KVChanged({model: KV_FLOOR_BYTES})
            case actions.RejectHeld(model, reason):
                raise DecisionError(f"the hub rejects requests for {model}: {reason}")
            case actions.Changed():
                self.num_evictions += action.is_eviction
        return None


def measure_decisions(
    num_known: int, num_resident: int, num_requests: int, seed: int, progress: Callable[[str], None]
) -> DecisionFigures:
    """A hub keeps up to `num_resident` equal models and knows `num_known`; requests are Zipf(1) over all of them.

    Raises:
        DecisionError: the hub rejects a request, or drains a busy model.
    """
    names = [f"m{number:05d}" for number in range(num_known)]
    footprints = {name: Footprint(name, MODEL_BYTES, KV_FLOOR_BYTES, WORKSPACE_BYTES) for name in names}
    hub = Hub(_config(num_resident))
    driver = _Driver(hub, footprints)
    for name in names:
        driver.ask(name)
    ask_ns = driver.taken_ns.pop("Ask")
    progress(f"the hub knows {num_known} models")
    sequence = zipf_sequence(num_known, num_requests, 1.0, seed)
    open_models: collections.deque[str] = collections.deque()
    for number, model in enumerate(sequence):
        driver.now_s += REQUEST_GAP_S
        if len(open_models) >= NUM_OPEN:
            _end(hub, driver, open_models.popleft())
        driver.tell(events.RequestArrived(names[model]))
        open_models.append(names[model])
        if number % TICK_EVERY == 0:
            driver.tell(events.Tick())
    progress(f"{num_requests} requests decided")
    num_serving = sum(entry.state.is_serving for entry in hub.residents())
    return summary(driver.taken_ns, ask_ns, num_known, num_serving, driver.num_loads, driver.num_evictions)


def summary(
    taken_ns: dict[str, list[int]],
    ask_ns: list[int],
    num_known: int,
    num_resident: int,
    num_loads: int,
    num_evictions: int,
) -> DecisionFigures:
    """Figures of nanoseconds by kind of call."""
    every = [1e-9 * value for values in taken_ns.values() for value in values]
    return DecisionFigures(
        decision_p50_s=percentile(every, 50),
        decision_p99_s=percentile(every, 99),
        decision_p999_s=percentile(every, 99.9),
        decision_max_s=max(every),
        by_call_p99_s={name: 1e-9 * percentile(values, 99) for name, values in sorted(taken_ns.items())},
        num_calls=len(every),
        num_known=num_known,
        num_resident=num_resident,
        num_loads=num_loads,
        num_evictions=num_evictions,
        ask_p99_s=1e-9 * percentile(ask_ns, 99),
    )


def _config(num_resident: int) -> HubConfig:
    """A budget whose high watermark lies just above so many models: idle ones leave when there are more."""
    needed = num_resident * (MODEL_BYTES + KV_FLOOR_BYTES) + WORKSPACE_BYTES
    return HubConfig(budget_bytes=math.ceil(needed / HubConfig(budget_bytes=0).high_watermark))


def _end(hub: Hub, driver: _Driver, name: str) -> None:
    entry = hub.entry(name)
    was_held = entry is not None and not entry.state.is_serving
    driver.tell(events.RequestEnded(name, was_held=was_held))
