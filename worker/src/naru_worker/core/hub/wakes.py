"""When time alone changes something: idle limits that are over, and the next moment worth a Tick."""

from __future__ import annotations

from collections.abc import Iterator

from naru_worker.core.hub.movement import evict
from naru_worker.core.hub.records import Record
from naru_worker.core.hub.state import HubState

_LOOK_AHEAD = 64


def next_wake_s(state: HubState) -> float | None:
    """The earliest time after now at which a Tick may change something, now where one is overdue; None: never."""
    earliest_s = min(_due_times_s(state), default=None)
    return None if earliest_s is None else max(earliest_s, state.now_s)


def send_idle_away(state: HubState) -> None:
    """Models whose idle time is over leave the engine."""
    for record in tuple(state.loaded.values()):
        due_s = _idle_limit_s(record)
        if due_s is not None and state.now_s >= due_s:
            ttl_s = record.entry.residency.idle_ttl_s
            evict(state, record, f"no request came for {ttl_s:.4g} s, its idle limit")


def _idle_limit_s(record: Record) -> float | None:
    """When a serving model has been idle for long enough to leave; None: it stays."""
    entry = record.entry
    residency = entry.residency
    if residency.idle_ttl_s <= 0.0 or residency.pinned or residency.keep_last_copy:
        return None
    if not record.is_serving or entry.num_in_flight:
        return None
    return entry.last_used_s + residency.idle_ttl_s


def _due_times_s(state: HubState) -> Iterator[float]:
    failure_s = state.next_failure_timer_s()
    if failure_s is not None:
        yield failure_s
    is_tight = state.is_above_high_watermark() or len(state.loads) > 0
    for record in state.loaded.values():
        limit_s = _idle_limit_s(record)
        if limit_s is not None:
            yield limit_s
        if is_tight and record.is_serving and not record.entry.residency.pinned:
            yield from _later(state, state.guarded_until_s(record))
    if not is_tight:
        return
    for record in state.trimming.values():
        yield from _later(state, record.trim_until_s)
    if state.memory.untold_bytes:
        yield state.untold_until_s
    for name in state.loads.first(_LOOK_AHEAD):
        blocked_s = state.records[name].blocked_since_s
        if blocked_s is not None:
            yield from _later(state, blocked_s + state.config.fair_wait_s)


def _later(state: HubState, time_s: float) -> Iterator[float]:
    """What has passed already was acted on when it did."""
    if time_s > state.now_s:
        yield time_s
