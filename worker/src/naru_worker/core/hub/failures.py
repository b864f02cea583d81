"""What a failed load leaves behind: its reason, its pause, and requests that are told at once."""

from __future__ import annotations

from naru_worker.core.hub.accounts import total_bytes
from naru_worker.core.hub.actions import RejectHeld
from naru_worker.core.hub.backoff import failures_in_row, retry_at_s
from naru_worker.core.hub.model import Footprint, Tier
from naru_worker.core.hub.movement import advance, reject_held
from naru_worker.core.hub.records import Place, Record
from naru_worker.core.hub.state import HubState

_ROOM_RETRY_S = 1.0
"""When it may help to ask again for a model that only pinned ones keep out: somebody has to unpin one first."""


def never_fits(footprint: Footprint, budget_bytes: int) -> str:
    """Why a model cannot be loaded even into an empty worker, with the numbers. Empty: it can."""
    if total_bytes(footprint) <= budget_bytes:
        return ""
    return f"{_needs(footprint)} and the budget is {budget_bytes} bytes: it can never fit; give the worker more memory"


def refusal_for_good(state: HubState, footprint: Footprint) -> str:
    """Why a load cannot fit as things are: with everything evicted that may ever be. Empty: it can."""
    budget_bytes = state.config.budget_bytes
    never = never_fits(footprint, budget_bytes)
    if never:
        return never
    pinned = [name for name in state.pinned if state.memory.holds(name) and name not in state.leaving]
    missing_bytes = state.memory.least_bytes(footprint, pinned) - budget_bytes
    if missing_bytes <= 0:
        return ""
    unreturned = state.memory.unreturned_bytes
    return (
        f"{_needs(footprint)}; {max(0, state.memory.free_bytes)} of {budget_bytes} bytes are free and "
        f"{missing_bytes} bytes are missing even when all others leave: pinned are {sorted(pinned)!r}"
        + (f", and {unreturned} bytes were not returned by unloads" if unreturned else "")
        + "; unpin or release one"
    )


def _needs(footprint: Footprint) -> str:
    return (
        f"it needs {total_bytes(footprint)} bytes ({footprint.weight_bytes} of weights, {footprint.kv_floor_bytes} of "
        f"KV floor, {footprint.workspace_bytes} of workspace, {footprint.private_bytes} of its own)"
    )


def fail(state: HubState, record: Record, error: str, *, is_permanent: bool) -> None:
    """A fetch, host or load operation of a record failed; the operation has ended, and nothing of it is left but
    weights that were in host memory before, maybe.
    """
    entry, now_s = record.entry, state.now_s
    entry.num_failures = failures_in_row(state.config, entry.num_failures, record.failed_at_s, now_s) + 1
    entry.retry_at_s = retry_at_s(state.config, entry.num_failures, now_s, is_permanent=is_permanent)
    _mark(state, record, error)
    record.is_permanent = is_permanent
    if record.place is Place.HOST and not is_permanent:
        record.goal = max(record.goal, Tier.HOST)
    if is_permanent:
        record.goal = Tier.COLD
    else:
        state.set_failure_timer(entry.retry_at_s, record)
    state.set_failure_timer(now_s + state.config.backoff_expires_s, record)
    reject_held(state, record, f"model {record.name!r} failed to load: {error}", refused_retry_s(state, record))
    advance(state, record, error)


def fail_without_room(state: HubState, record: Record, refusal: str) -> None:
    """It cannot be loaded whatever may be evicted; it is tried again when something is unpinned or released."""
    _mark(state, record, refusal)
    record.is_without_room = True
    record.entry.retry_at_s = state.now_s
    if record.place is Place.HOST:
        record.goal = max(record.goal, Tier.HOST)
    state.without_room[record.name] = record
    reject_held(state, record, f"model {record.name!r} has no room: {refusal}", refused_retry_s(state, record))
    advance(state, record, refusal)


def clear_failure(state: HubState, record: Record, *, is_forgotten: bool = False) -> None:
    """It may be tried again. Forgotten: as if it had never failed; else the next failure in a row counts on."""
    record.is_failed = record.is_permanent = record.is_without_room = False
    state.without_room.pop(record.name, None)
    if is_forgotten:
        record.entry.num_failures = 0
        record.entry.error = ""
        record.entry.retry_at_s = 0.0


def refuse_request(state: HubState, record: Record) -> bool:
    """Whether a request that has just come for a failed model is refused at once; else the model is tried again."""
    entry = record.entry
    if record.is_without_room:
        assert entry.footprint is not None, "room is only looked for when the footprint is known"
        is_refused = bool(refusal_for_good(state, entry.footprint))
    else:
        is_refused = state.now_s < entry.retry_at_s
    if is_refused:
        reason = f"model {record.name!r} failed {state.now_s - record.failed_at_s:.3g} s ago: {entry.error}"
        state.actions.append(RejectHeld(record.name, reason, refused_retry_s(state, record)))
    else:
        clear_failure(state, record)
    return is_refused


def refused_retry_s(state: HubState, record: Record) -> float:
    """When asking again may help; 0: it will not."""
    footprint = record.entry.footprint
    if record.is_permanent:
        return 0.0
    if record.is_without_room:
        can_fit = footprint is not None and total_bytes(footprint) <= state.config.budget_bytes
        return _ROOM_RETRY_S if can_fit else 0.0
    return max(record.entry.retry_at_s - state.now_s, 0.001)


def retry_due(state: HubState) -> None:
    """Tries again, or forgets, what failed long enough ago."""
    for record in state.due_failures():
        if not record.is_failed or record.is_without_room:
            continue
        if state.now_s >= record.failed_at_s + state.config.backoff_expires_s:
            clear_failure(state, record, is_forgotten=True)
            advance(state, record, "its failure is long ago")
        elif state.now_s >= record.entry.retry_at_s and record.wanted > Tier.COLD:
            clear_failure(state, record)
            advance(state, record, "it is tried again after a failure")


def retry_without_room(state: HubState) -> None:
    """After something left or was unpinned: those that may fit now are tried again."""
    for record in tuple(state.without_room.values()):
        footprint = record.entry.footprint
        if footprint is None or not refusal_for_good(state, footprint):
            clear_failure(state, record, is_forgotten=True)
            advance(state, record, "there may be room for it now")


def _mark(state: HubState, record: Record, error: str) -> None:
    record.is_failed = True
    record.is_permanent = record.is_without_room = False
    record.failed_at_s = state.now_s
    record.entry.error = error
    record.is_for_request = False
    record.goal = record.entry.tier
