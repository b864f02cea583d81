"""Which waiting fetches and loads begin now, and who makes room for those that do not fit.

Strict in the queue's order. Bytes that are free or on their way are promised to the first in line before anybody
behind is looked at, so that no byte is promised twice and nobody is evicted twice for the same need. One exception:
while a load waits for busy models, and for the fair wait at most, loads behind it that fit as things are may pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from naru_worker.core.hub.accounts import page_key
from naru_worker.core.hub.actions import Fetch, Load, RaiseToHost
from naru_worker.core.hub.failures import fail_without_room, refusal_for_good
from naru_worker.core.hub.model import Footprint, Tier
from naru_worker.core.hub.movement import advance, make_host_room
from naru_worker.core.hub.records import Operation, Place, Record
from naru_worker.core.hub.room import make_room
from naru_worker.core.hub.state import HubState

_LOOK_AHEAD = 64
"""Waiting loads looked at in one go: enough for those that may pass, and a bound on the time of a decision."""


def begin_fetches(state: HubState) -> None:
    """Begins fetches in the queue's order while slots are free."""
    for name in state.fetches.first(state.config.max_fetches):
        if state.num_fetches >= state.config.max_fetches:
            return
        record = state.records[name]
        queued_s = record.queued_s
        attempt = state.begin(record, Operation.FETCH)
        state.actions.append(Fetch(name, attempt))
        state.dequeue(record)
        record.queued_s = queued_s
        state.announce(record, _reason_to_come(record))


@dataclass(slots=True)
class _Line:
    """What is left while the queue is gone through."""

    spare_bytes: int
    """Free and coming."""
    promised_bytes: int = 0
    before: list[Footprint] = field(default_factory=list)
    """Of the loads that were promised bytes."""
    num_committed: int = 0
    is_barred: bool = False
    """One in front waits for busy models: nobody behind it has others evicted."""

    @property
    def available_bytes(self) -> int:
        return self.spare_bytes - self.promised_bytes

    def promise(self, num_bytes: int, footprint: Footprint) -> None:
        self.promised_bytes += num_bytes
        self.before.append(footprint)


def begin_loads(state: HubState) -> None:
    """Begins loads that fit, has room made for those that do not, and fails those that never will."""
    state.promised_bytes = 0
    if not len(state.loads):
        return
    line = _Line(state.spare_bytes())
    for name in state.loads.first(_LOOK_AHEAD):
        if state.num_loads >= state.config.max_loads:
            break
        if name not in state.loads:
            continue
        record = state.records[name]
        if record.wanted is Tier.HOST:
            _raise_to_host(state, record)
        else:
            _consider(state, record, line)
    state.promised_bytes = line.promised_bytes


def _consider(state: HubState, record: Record, line: _Line) -> None:
    memory, footprint = state.memory, record.entry.footprint
    assert footprint is not None, "whatever waits for a load was fetched"
    need_bytes = memory.planned_bytes(footprint, line.before, state.leaving) - memory.asleep_bytes([record.name])
    if need_bytes <= line.available_bytes:
        if memory.load_bytes(record.name, footprint) <= memory.free_bytes:
            _load(state, record, footprint)
            line.spare_bytes = state.spare_bytes()
        else:
            line.promise(need_bytes, footprint)
            line.num_committed += record.is_committed
        return
    refusal = refusal_for_good(state, footprint)
    if refusal:
        fail_without_room(state, record, refusal)
        return
    if line.is_barred or (not record.is_committed and line.num_committed >= state.config.max_loads):
        line.is_barred = True
        return
    blocked_since_s = state.now_s if record.blocked_since_s is None else record.blocked_since_s
    is_overdue = state.now_s >= blocked_since_s + state.config.fair_wait_s
    kept_keys = {page_key(each) for each in (*line.before, footprint)}
    if make_room(state, record, need_bytes - line.available_bytes, kept_keys, may_drain_busy=is_overdue):
        record.is_committed = True
        record.blocked_since_s = None
        state.rerank(record)
        line.spare_bytes = state.spare_bytes()
        line.promise(need_bytes, footprint)
        line.num_committed += 1
        return
    line.is_barred = True
    record.blocked_since_s = blocked_since_s
    if is_overdue:
        line.promise(need_bytes, footprint)


def _load(state: HubState, record: Record, footprint: Footprint) -> None:
    num_bytes = state.memory.begin_load(record.name, footprint)
    record.entry.kv_bytes = footprint.kv_floor_bytes
    attempt = state.begin(record, Operation.LOAD)
    state.actions.append(Load(record.name, attempt, num_bytes))
    state.dequeue(record)
    state.announce(record, _reason_to_come(record))


def _raise_to_host(state: HubState, record: Record) -> None:
    footprint = record.entry.footprint
    assert footprint is not None, "whatever waits for a load was fetched"
    room = make_host_room(state, record, state.memory.host_need_bytes(footprint))
    if room.is_there:
        state.memory.join_host(record.name, footprint)
        attempt = state.begin(record, Operation.RAISE)
        state.actions.append(RaiseToHost(record.name, attempt))
        state.dequeue(record)
    elif not room.is_coming:
        record.goal = Tier.COLD
        record.wait_reason = "host memory has no room for it: what is there was used later, or is pinned"
        assert record.place is Place.FETCHED, "only fetched models wait to be raised"
        advance(state, record, record.wait_reason)


def _reason_to_come(record: Record) -> str:
    entry = record.entry
    if entry.num_held:
        return f"{entry.num_held} requests wait for it"
    if record.is_demanded:
        return "a request came for it"
    if record.is_moved:
        return f"it is moved to tier {record.goal.name}"
    return f"generation {entry.generation} asks for it at tier {entry.tier.name}"
