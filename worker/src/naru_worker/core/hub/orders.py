"""What a command that was not refused does to a record: who wants the model where from now on."""

from __future__ import annotations

import math

from naru_proto.errors import InvalidRequest
from naru_worker.core.hub.events import Ask, Move, Release
from naru_worker.core.hub.failures import clear_failure
from naru_worker.core.hub.model import Residency, Tier
from naru_worker.core.hub.movement import advance, reject_held
from naru_worker.core.hub.records import Place, Record
from naru_worker.core.hub.state import HubState

_RELEASED_RETRY_S = 1.0
"""A released model that is still known comes up again for the next request."""


def record_to_ask(state: HubState, ask: Ask) -> Record:
    """The record of the asked model, a new one where the name is new.

    Raises:
        InvalidRequest: no more names are remembered.
    """
    record = state.records.get(ask.model)
    if record is not None:
        return record
    if not state.make_name_room():
        raise InvalidRequest(
            f"model {ask.model!r} is new and {state.config.max_known_models} models are known, which is the limit; "
            "release one first",
            param="model",
        )
    return state.add(ask.model)


def apply_ask(state: HubState, record: Record, ask: Ask) -> None:
    """Takes over generation, spec, tier and residency, and sets out for the tier.

    An asked tier that repeats the last one does not take down what requests have raised; a lower one does.
    """
    entry = record.entry
    is_known, is_other = entry.spec is not None, entry.spec != ask.spec
    is_newer = ask.generation > entry.generation
    is_lowered = ask.tier < entry.tier
    state.has_room_changed |= entry.residency.pinned and not ask.residency.pinned
    entry.generation = ask.generation
    entry.fencing_token = max(entry.fencing_token, ask.fencing_token)
    entry.spec, entry.tier, entry.residency = ask.spec, ask.tier, ask.residency
    record.generation_spec = ask.spec
    state.index_pin(record)
    state.forgotten.pop(record.name, None)
    entry.footprint = record.footprint if record.footprint_spec == ask.spec else None
    if entry.footprint is None:
        if record.place is Place.FETCHED:
            state.dequeue(record)
            state.place(record, Place.NONE)
    if not is_known or is_lowered or ask.tier > record.goal:
        record.goal = ask.tier
        record.moved = None
    if ask.tier is Tier.ACTIVE:
        record.drain_deadline_s = math.inf
    if ask.for_request:
        record.is_for_request = True
        entry.last_used_s = state.now_s
    state.rank_in_host(record)
    record.wait_reason = ""
    _look_at_failure(state, record, is_forgotten=is_newer or is_other)
    advance(state, record, f"generation {ask.generation} asks for it at tier {ask.tier.name}")
    state.rerank(record)


def apply_release(state: HubState, record: Record, release: Release) -> None:
    """Takes the model down; requests that wait for it are refused, running ones have their time."""
    entry = record.entry
    if release.generation > entry.generation:
        record.generation_spec = entry.spec if release.tier is not None else None
    entry.generation = release.generation
    entry.fencing_token = max(entry.fencing_token, release.fencing_token)
    tier = release.tier if entry.spec is not None else None
    state.has_room_changed = True
    if tier is None:
        entry.spec = None
        entry.residency = Residency()
        state.index_pin(record)
        clear_failure(state, record, is_forgotten=True)
    record.goal = entry.tier = Tier.COLD if tier is None else tier
    record.moved = None
    record.is_for_request = False
    record.wait_reason = ""
    state.rank_in_host(record)
    record.drain_deadline_s = state.now_s + release.drain_timeout_s
    why = f"generation {release.generation} released it" + ("" if tier is None else f" to tier {tier.name}")
    reject_held(state, record, f"model {record.name!r}: {why}", 0.0 if tier is None else _RELEASED_RETRY_S)
    advance(state, record, why)


def apply_move(state: HubState, record: Record, move: Move) -> None:
    """Sets out for another tier; what was asked for (generation, spec, tier, residency) stays as it is.

    So an order that is told again later changes nothing, and a copy that fails goes back to where it was ordered.
    """
    entry = record.entry
    is_down = move.tier < record.near
    entry.fencing_token = max(entry.fencing_token, move.fencing_token)
    record.goal = record.moved = move.tier
    record.wait_reason = ""
    why = f"it is moved to tier {move.tier.name}"
    if is_down:
        record.is_for_request = False
        record.drain_deadline_s = state.now_s + move.drain_timeout_s
        state.has_room_changed = True
        reject_held(state, record, f"model {record.name!r}: {why}", _RELEASED_RETRY_S)
    else:
        if move.tier is Tier.ACTIVE:
            record.drain_deadline_s = math.inf
        if move.for_request:
            record.is_for_request = True
            entry.last_used_s = state.now_s
        _look_at_failure(state, record, is_forgotten=False)
    state.rank_in_host(record)
    advance(state, record, why)
    state.rerank(record)


def _look_at_failure(state: HubState, record: Record, *, is_forgotten: bool) -> None:
    """A failed model is tried again where its pause is over, or the order is another one."""
    if not record.is_failed:
        return
    is_over = not record.is_without_room and state.now_s >= record.entry.retry_at_s and record.goal > Tier.COLD
    if is_forgotten or is_over:
        clear_failure(state, record, is_forgotten=is_forgotten)
    state.has_room_changed |= record.is_without_room
