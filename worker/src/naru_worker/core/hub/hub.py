"""The model hub: which models are in memory, and why. Pure: commands, requests and results in, actions out.

Called by the shell that owns the engines, from one thread, with the time of its clock; it does no work of its own.
What the shell has to know beside the docstrings of events and actions:

- Held requests go to the engine when a `Changed` says that their model serves (READY or ACTIVE); the hub has then
  counted them as in flight. Loaded alone does not mean it: a model that is no longer wanted is drained at once.
- After `RejectHeld` the hub counts no held request of that model: no RequestEnded follows for those.
- A Drain under way may be overtaken by one with an earlier end and a new attempt (eviction, then release).
- After Stopped or Failed a model holds nothing, host memory included; after NoRoom it is where it was before the Load.
- `is_eviction` is set once for each eviction: on the change that ends it (to HOST or COLD).
"""

from __future__ import annotations

from collections.abc import Iterable

from naru_proto.errors import LoadError
from naru_worker.core.hub import explanation, orders, results, wakes
from naru_worker.core.hub.actions import Action
from naru_worker.core.hub.admission import begin_fetches, begin_loads
from naru_worker.core.hub.commands import check_ask, check_move, check_release
from naru_worker.core.hub.config import HubConfig
from naru_worker.core.hub.events import (
    Ask,
    BytesReturned,
    KVChanged,
    Move,
    Release,
    RequestArrived,
    RequestEnded,
    Result,
    Tick,
)
from naru_worker.core.hub.eviction import VictimChooser, choose_victims
from naru_worker.core.hub.failures import never_fits, retry_due, retry_without_room
from naru_worker.core.hub.memory import MemoryView
from naru_worker.core.hub.model import ModelEntry, Tier
from naru_worker.core.hub.movement import advance
from naru_worker.core.hub.records import Place, Record
from naru_worker.core.hub.room import sweep
from naru_worker.core.hub.state import HubState


class Hub:
    """Mutable. Every method takes the time in seconds of one clock that never goes back."""

    def __init__(self, config: HubConfig, choose: VictimChooser = choose_victims) -> None:
        """`choose` picks the victims of a load; the default is the hub's own policy."""
        self._state = HubState(config, choose)

    def ask(self, ask: Ask, now_s: float) -> tuple[Action, ...]:
        """Somebody wants a model at a tier. What is refused changes nothing.

        Raises:
            StaleCommand: a newer generation or fencing token was seen.
            InvalidRequest: the generation stands for something else already, or a field is out of range.
            LoadError: it is known that the model can never fit; the message has the numbers.
        """
        state = self._state
        record = state.records.get(ask.model)
        if record is None:
            check_ask(None, None, ask)
        else:
            check_ask(record.entry, record.generation_spec, ask)
            if record.footprint_spec == ask.spec and ask.tier is Tier.ACTIVE:
                self._refuse_what_never_fits(record)
        self._set_time(now_s)
        orders.apply_ask(state, orders.record_to_ask(state, ask), ask)
        return self._settle()

    def release(self, release: Release, now_s: float) -> tuple[Action, ...]:
        """Somebody wants a model down. A name never heard of is remembered with its generation.

        Raises:
            StaleCommand: a newer generation or fencing token was seen.
            InvalidRequest: a field is out of range.
        """
        state = self._state
        record = state.records.get(release.model)
        check_release(None if record is None else record.entry, release)
        self._set_time(now_s)
        if record is None:
            if not state.make_name_room():
                return ()
            record = state.add(release.model)
        orders.apply_release(state, record, release)
        return self._settle()

    def move(self, move: Move, now_s: float) -> tuple[Action, ...]:
        """Somebody wants a known model nearer or farther; the orders for it stay. What is refused changes nothing.

        Raises:
            ModelNotFound: nothing is known to load under this name.
            StaleCommand: a newer fencing token was seen.
            InvalidRequest: a field is out of range.
            Unavailable: it has requests and may be moved only without, or its loads fail.
            LoadError: it is known that the model can never fit; the message has the numbers.
        """
        state = self._state
        record = check_move(state.records.get(move.model), move, max(state.now_s, now_s))
        if move.tier is Tier.ACTIVE:
            self._refuse_what_never_fits(record)
        self._set_time(now_s)
        orders.apply_move(state, record, move)
        return self._settle()

    def handle(self, event: Result, now_s: float) -> tuple[Action, ...]:
        """A request came or went, an action had its result, or time passed. Results of older attempts are ignored."""
        state = self._state
        self._set_time(now_s)
        match event:
            case RequestArrived():
                results.on_request(state, event)
            case RequestEnded():
                results.on_request_end(state, event)
            case KVChanged():
                results.on_kv(state, event)
            case BytesReturned():
                results.on_bytes_returned(state, event)
            case Tick():
                retry_due(state)
                wakes.send_idle_away(state)
            case _:
                results.on_operation(state, event)
        return self._settle()

    def next_wake_s(self, now_s: float) -> float | None:
        """When a Tick may change something next, at least `now_s`; None: only an event can."""
        self._set_time(now_s)
        return wakes.next_wake_s(self._state)

    def entry(self, name: str) -> ModelEntry | None:
        """What is known of a model; a forgotten one has `spec` None. To be read, not written."""
        record = self._state.records.get(name)
        return None if record is None else record.entry

    def is_settled(self, name: str) -> bool:
        """Whether nothing is under way for a model and it waits for nothing: it rests where it is."""
        record = self._state.records.get(name)
        return record is None or (record.operation is None and record.queued_s is None)

    def expected_load_s(self, name: str) -> float:
        """What the load of a model takes, from where it is, by past ones; 0: not known."""
        record = self._state.records.get(name)
        return 0.0 if record is None else self._state.load_s(record, is_from_host=record.place is Place.HOST)

    def entries(self) -> Iterable[ModelEntry]:
        """All models known and not forgotten, oldest first."""
        return (record.entry for record in self._state.records.values() if record.entry.is_wanted)

    def residents(self) -> Iterable[ModelEntry]:
        """All models in any state but COLD."""
        return (record.entry for record in self._state.residents.values())

    def explain(self, name: str, now_s: float) -> tuple[str, ...]:
        """Why a model is where it is: sentences, most important first. Empty: it is not known."""
        self._set_time(now_s)
        record = self._state.records.get(name)
        return () if record is None else explanation.explain(self._state, record)

    @property
    def memory(self) -> MemoryView:
        """Budget and what is booked of it."""
        return self._state.memory.view()

    def _refuse_what_never_fits(self, record: Record) -> None:
        footprint = record.entry.footprint
        never = "" if footprint is None else never_fits(footprint, self._state.config.budget_bytes)
        if never:
            raise LoadError(f"model {record.name!r} is refused: {never}")

    def _set_time(self, now_s: float) -> None:
        self._state.now_s = max(self._state.now_s, now_s)

    def _settle(self) -> tuple[Action, ...]:
        """Begins whatever may begin now, and gives out the actions of this call in order."""
        state = self._state
        if state.memory.untold_bytes and state.now_s >= state.untold_until_s:
            state.memory.untold_bytes = 0
        waiters = tuple(state.host_waiters.values())
        state.host_waiters.clear()
        for record in waiters:
            if record.place is Place.DRAINED and record.operation is None:
                advance(state, record, "host memory has changed")
        if state.has_room_changed:
            state.has_room_changed = False
            retry_without_room(state)
        begin_fetches(state)
        begin_loads(state)
        sweep(state)
        actions = tuple(state.actions)
        state.actions.clear()
        return actions
