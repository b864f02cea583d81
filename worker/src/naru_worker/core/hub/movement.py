"""Moves one model one step towards where it is wanted. Which loads may begin is decided in `admission`.

Every function may be called at any time: it looks at where the record stands, and does nothing where nothing is due.
"""

from __future__ import annotations

import math

from naru_worker.core.hub.actions import Drain, DropHost, RejectHeld, Stop, Unload
from naru_worker.core.hub.host_room import HostRoom, find_host_room
from naru_worker.core.hub.model import Tier
from naru_worker.core.hub.records import Operation, Place, Record
from naru_worker.core.hub.state import HubState

_NEEDED_TIER = {Operation.FETCH: Tier.HOST, Operation.RAISE: Tier.HOST, Operation.LOAD: Tier.ACTIVE}


def advance(state: HubState, record: Record, why: str) -> None:
    """One step: begins what needs no turn (drain, unload, drop), joins the queue for what does, or stops what is void.

    `why` is the reason of a change of state that comes of it.
    """
    if record.operation is not None:
        _steer(state, record)
    elif record.place is Place.DRAINED:
        _unload(state, record)
    elif record.place is Place.LOADED:
        if record.wanted < Tier.ACTIVE or record.is_other_copy or record.eviction:
            drain(state, record)
    elif record.place is Place.HOST:
        _advance_in_host(state, record)
    else:
        _advance_below_host(state, record)
    if record.place is Place.LOADED or record.operation is not None:
        state.dequeue(record)
    if record.entry.spec is None and record.is_at_rest:
        state.forgotten.setdefault(record.name, record)
    state.announce(record, why)


def evict(state: HubState, record: Record, reason: str) -> None:
    """The hub takes a model down, or out of host memory: it rests there until somebody wants it again."""
    record.eviction = reason
    record.is_for_request = False
    if record.place is Place.HOST and record.operation is None:
        record.goal = Tier.COLD
        drop_host(state, record)
    else:
        record.goal = Tier.HOST
    advance(state, record, reason)


def reject_held(state: HubState, record: Record, reason: str, retry_s: float) -> None:
    """Ends the requests that wait for a model, and what they demanded."""
    record.is_demanded = False
    if record.entry.num_held:
        record.entry.num_held = 0
        state.actions.append(RejectHeld(record.name, reason, retry_s))


def drain(state: HubState, record: Record) -> None:
    """No further request reaches its engine; running ones may finish until the record's deadline."""
    deadline_s = record.drain_deadline_s
    attempt = state.begin(record, Operation.DRAIN)
    record.issued_deadline_s = deadline_s
    timeout_s = None if math.isinf(deadline_s) else max(0.0, deadline_s - state.now_s)
    state.actions.append(Drain(record.name, attempt, timeout_s))


def drop_host(state: HubState, record: Record) -> None:
    """Lets its image go from host memory, wanted or not: where it is wanted it comes back from its files."""
    attempt = state.begin(record, Operation.DROP)
    state.actions.append(DropHost(record.name, attempt))


def _steer(state: HubState, record: Record) -> None:
    """What to do about an operation under way: nothing as long as it leads where the model is wanted."""
    operation = record.operation
    assert operation is not None, "only called while one is under way"
    needed_tier = _NEEDED_TIER.get(operation)
    if needed_tier is not None:
        is_void = record.operation_spec != record.entry.spec or record.wanted < needed_tier
        if is_void and not record.is_stopping:
            state.mark_stopping(record)
            state.actions.append(Stop(record.name, record.entry.attempt))
    elif operation is Operation.DRAIN and record.drain_deadline_s < record.issued_deadline_s:
        drain(state, record)


def _advance_in_host(state: HubState, record: Record) -> None:
    wanted = record.wanted
    if wanted < Tier.HOST or record.is_other_copy:
        drop_host(state, record)
    elif wanted is Tier.ACTIVE and not record.is_failed:
        state.enqueue(record, state.loads)
    else:
        state.dequeue(record)


def _advance_below_host(state: HubState, record: Record) -> None:
    wanted = record.wanted
    if wanted is Tier.HOST and not record.is_failed:
        record.wait_reason = _host_refusal(state, record)
    if wanted is Tier.COLD or record.is_failed or (wanted is Tier.HOST and record.wait_reason):
        state.dequeue(record)
        state.place(record, Place.NONE)
    else:
        record.wait_reason = ""
        state.enqueue(record, state.loads if record.place is Place.FETCHED else state.fetches)


def _host_refusal(state: HubState, record: Record) -> str:
    budget_bytes = state.config.host_budget_bytes
    footprint = record.entry.footprint
    if budget_bytes == 0:
        return "it is wanted in host memory, but this worker has no budget for that; the first request brings it up"
    if footprint is not None and footprint.weight_bytes > budget_bytes:
        return (
            f"it is wanted in host memory, but its {footprint.weight_bytes} bytes of weights never fit the budget of "
            f"{budget_bytes} bytes; the first request brings it up"
        )
    return ""


def _unload(state: HubState, record: Record) -> None:
    """Unloads a drained model, to host memory where it is wanted there and has room; waits while room is being made."""
    memory, name, entry = state.memory, record.name, record.entry
    is_same = entry.loaded_spec == entry.spec
    keep_host = state.config.host_budget_bytes > 0 and is_same and record.wanted >= Tier.HOST
    room = find_host_room(state, record, memory.unload_host_bytes(name, keep_host=keep_host))
    if room.victims:
        _evict_from_host(state, record, room)
    if room.is_coming:
        state.host_waiters[name] = record
        return
    if not room.is_there:
        keep_host = False
        others = [state.records[other] for other in memory.host_keepers(name)]
        for other in others:
            if other.place is Place.HOST and other.operation is None:
                evict(state, other, f"its weights were those of {name!r}, which left, and host memory has no room")
        if others:
            state.host_waiters[name] = record
            return
    if not keep_host and is_same and record.goal is Tier.HOST:
        record.goal = Tier.COLD
        record.wait_reason = "host memory had no room for it when it left the engine"
    record.is_unloading_to_host = keep_host
    memory.begin_unload(name, keep_host=keep_host)
    attempt = state.begin(record, Operation.UNLOAD)
    state.actions.append(Unload(name, attempt, keep_host))


def _evict_from_host(state: HubState, record: Record, room: HostRoom) -> None:
    for victim in room.victims:
        evict(state, victim, f"host memory was needed for {record.name!r}, which was used later")


def make_host_room(state: HubState, record: Record, num_bytes: int) -> HostRoom:
    """Room in host memory for a model that is to be raised there; evicts from host memory where that helps."""
    room = find_host_room(state, record, num_bytes)
    if room.victims:
        _evict_from_host(state, record, room)
    return room
