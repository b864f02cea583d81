"""What each event does to the hub's state, before the hub looks at what may begin now.

Results of operations that are not under way any more are void: the attempt says which one a result belongs to.
"""

from __future__ import annotations

import math

from naru_worker.core.hub.accounts import total_bytes
from naru_worker.core.hub.actions import RejectHeld
from naru_worker.core.hub.events import (
    BytesReturned,
    Drained,
    Failed,
    Fetched,
    HostDropped,
    HostReached,
    KVChanged,
    Loaded,
    NoRoom,
    RequestArrived,
    RequestEnded,
    Stopped,
    Unloaded,
)
from naru_worker.core.hub.failures import clear_failure, fail, fail_without_room, refusal_for_good, refuse_request
from naru_worker.core.hub.model import Tier
from naru_worker.core.hub.movement import advance
from naru_worker.core.hub.records import Operation, Place, Record
from naru_worker.core.hub.room import told_of_kv
from naru_worker.core.hub.state import HubState

_DRIFT_PATIENCE_S = 1.0
"""KV growth that a refused booking told of is believed for so long, or until the engines tell of their KV."""
OperationResult = Fetched | HostReached | NoRoom | Loaded | Failed | Stopped | Drained | Unloaded | HostDropped


def on_request(state: HubState, event: RequestArrived) -> None:
    """It goes to the engine, or waits and brings the model up, or is refused at once."""
    record = state.records.get(event.model)
    if record is None or record.entry.spec is None:
        state.actions.append(RejectHeld(event.model, f"model {event.model!r} is not known to this worker", 0.0))
        return
    entry = record.entry
    if record.is_failed and refuse_request(state, record):
        return
    entry.last_used_s = state.now_s
    record.uses += 1
    record.popularity = 1.0 + record.popularity_now(state.now_s, state.config.popularity_half_life_s)
    record.popularity_at_s = state.now_s
    state.rank_in_host(record)
    if record.is_serving:
        entry.num_in_flight += 1
        state.announce(record, "a request came")
        return
    record.is_demanded = True
    entry.num_held += 1
    if entry.num_held == 1:
        entry.held_since_s = state.now_s
    advance(state, record, "a request came for it")
    state.rerank(record)


def on_request_end(state: HubState, event: RequestEnded) -> None:
    """One less; the model stays wanted even when nobody waits for it any more."""
    record = state.records.get(event.model)
    if record is None:
        return
    entry = record.entry
    if event.was_held:
        entry.num_held = max(0, entry.num_held - 1)
        state.rerank(record)
        return
    entry.num_in_flight = max(0, entry.num_in_flight - 1)
    entry.last_used_s = state.now_s
    record.no_trim_until_s = 0.0
    state.announce(record, "its last request ended")


def on_kv(state: HubState, event: KVChanged) -> None:
    """Committed KV of loaded models."""
    state.memory.untold_bytes = 0
    for name, kv_bytes in event.kv_bytes.items():
        record = state.records.get(name)
        if record is not None:
            told_of_kv(state, record, kv_bytes)


def on_bytes_returned(state: HubState, event: BytesReturned) -> None:
    """Bytes that an unload had not returned are free after all."""
    state.memory.unreturned_bytes -= min(max(0, event.num_bytes), state.memory.unreturned_bytes)
    state.has_room_changed = True


def on_operation(state: HubState, event: OperationResult) -> None:
    """Ends the operation that the result belongs to; anything else is void."""
    record = state.records.get(event.model)
    if record is None or record.operation is None or record.entry.attempt != event.attempt:
        return
    operation = record.operation
    match event:
        case Fetched() if operation is Operation.FETCH:
            _fetched(state, record, event)
        case HostReached() if operation is Operation.RAISE:
            state.end(record)
            record.entry.loaded_spec = record.operation_spec
            state.place(record, Place.HOST)
            advance(state, record, "its image is in host memory")
        case Loaded() if operation is Operation.LOAD:
            _loaded(state, record, event)
        case NoRoom() if operation is Operation.LOAD:
            _no_room(state, record, event)
        case Failed() if operation in (Operation.FETCH, Operation.RAISE, Operation.LOAD):
            _failed(state, record, event)
        case Stopped() if operation in (Operation.FETCH, Operation.RAISE, Operation.LOAD):
            _stopped(state, record)
        case Drained() if operation is Operation.DRAIN:
            state.end(record)
            record.entry.num_in_flight = 0
            state.place(record, Place.DRAINED)
            advance(state, record, "it is drained")
        case Unloaded() if operation is Operation.UNLOAD:
            _unloaded(state, record, event)
        case HostDropped() if operation is Operation.DROP:
            state.end(record)
            state.memory.leave_host(record.name)
            state.place(record, Place.NONE)
            advance(state, record, "its image left host memory")
        case _:
            return


def _fetched(state: HubState, record: Record, event: Fetched) -> None:
    state.end(record)
    if record.operation_spec != record.entry.spec:
        advance(state, record, "what was fetched is not wanted any more")
        return
    record.entry.footprint = record.footprint = event.footprint
    record.footprint_spec = record.entry.spec
    state.place(record, Place.FETCHED)
    if record.wanted is Tier.ACTIVE and total_bytes(event.footprint) > state.config.budget_bytes:
        fail_without_room(state, record, refusal_for_good(state, event.footprint))
    else:
        advance(state, record, "its files are here")


def _loaded(state: HubState, record: Record, event: Loaded) -> None:
    entry = record.entry
    state.end(record)
    state.memory.end_load(record.name)
    state.learn_load(record, event.load_s)
    entry.loaded_spec = record.operation_spec
    state.place(record, Place.LOADED)
    entry.load_s = max(0.0, event.load_s)
    entry.ready_since_s = entry.last_used_s = state.now_s
    clear_failure(state, record, is_forgotten=True)
    if record.wanted is Tier.ACTIVE and not record.is_other_copy:
        record.goal = Tier.ACTIVE
        record.is_demanded = record.is_for_request = False
        record.drain_deadline_s = math.inf
        entry.num_in_flight, entry.num_held = entry.num_held, 0
    record.queued_s = None
    advance(state, record, f"it was loaded in {event.load_s:.3g} s")


def _no_room(state: HubState, record: Record, event: NoRoom) -> None:
    footprint, memory = record.entry.footprint, state.memory
    state.end(record)
    memory.cancel_load(record.name)
    record.entry.kv_bytes = 0
    memory.untold_bytes = 0
    if footprint is not None and event.free_bytes < memory.load_bytes(record.name, footprint):
        memory.untold_bytes = max(0, memory.free_bytes - max(0, event.free_bytes))
        state.untold_until_s = state.now_s + _DRIFT_PATIENCE_S
    advance(state, record, f"its bytes could not be booked: {event.free_bytes} were free")
    if record.name in state.loads:
        record.is_committed = True
        state.rerank(record)


def _failed(state: HubState, record: Record, event: Failed) -> None:
    was_stopping = record.is_stopping
    state.memory.unreturned_bytes += max(0, event.unreturned_bytes)
    _leave_all(state, record, is_in_host=event.is_in_host and record.place is Place.HOST)
    if was_stopping:
        advance(state, record, f"it was stopped: {event.error}")
    else:
        fail(state, record, event.error, is_permanent=event.is_permanent)


def _stopped(state: HubState, record: Record) -> None:
    was_stopping = record.is_stopping
    _leave_all(state, record)
    if was_stopping:
        advance(state, record, "it was stopped: it is not wanted as it was")
    else:
        fail(state, record, "it was stopped before it was loaded", is_permanent=False)


def _leave_all(state: HubState, record: Record, *, is_in_host: bool = False) -> None:
    """Nothing of it is in memory any more, but where its weights stay in host memory, nor under way."""
    if record.operation is Operation.LOAD:
        state.memory.cancel_load(record.name)
        record.entry.kv_bytes = 0
    if not is_in_host:
        state.memory.leave_host(record.name)
    state.end(record)
    state.place(record, Place.HOST if is_in_host else Place.NONE)
    state.has_room_changed = True


def _unloaded(state: HubState, record: Record, event: Unloaded) -> None:
    state.end(record)
    state.memory.end_unload(record.name, max(0, event.unreturned_bytes))
    record.entry.kv_bytes = 0
    is_kept = record.is_unloading_to_host and not event.not_kept
    if not is_kept:
        state.memory.leave_host(record.name)
    if event.not_kept:
        record.goal = Tier.COLD if record.goal is Tier.HOST else record.goal
        record.wait_reason = f"host memory did not take it when it left the engine: {event.not_kept}"
    state.place(record, Place.HOST if is_kept else Place.NONE)
    if event.unreturned_bytes > 0 or event.error:
        record.wait_reason = (
            f"its last unload did not return {event.unreturned_bytes} bytes: {event.error or 'no reason was told'}"
        )
    state.has_room_changed = True
    tier = record.goal if record.is_moved else record.entry.tier
    advance(state, record, f"it was unloaded at tier {tier.name}")
