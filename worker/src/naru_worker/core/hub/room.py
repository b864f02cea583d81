"""Makes room in the engine's memory: cached prefixes first, then idle models, then busy ones that had their time.

Where that is not enough, models that wait in host memory leave it for what they have left in the engine's.

Also the sweep that brings the use of memory down between two watermarks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from naru_worker.core.hub.accounts import PageKey
from naru_worker.core.hub.actions import TrimKV
from naru_worker.core.hub.eviction import describe_bytes
from naru_worker.core.hub.host_room import resting_in_host
from naru_worker.core.hub.movement import evict
from naru_worker.core.hub.records import Record
from naru_worker.core.hub.state import HubState
from naru_worker.core.hub.victims import VictimChoice, is_idle

_TRIM_PATIENCE_S = 1.0
"""An order to give up KV that is not reported for so long is taken for lost; one that gave less than it was told to is
not repeated sooner, unless a request ends."""


def make_room(
    state: HubState, record: Record, deficit_bytes: int, kept_keys: Collection[PageKey], *, may_drain_busy: bool
) -> bool:
    """Trims and evicts for a load so that `deficit_bytes` come free. False: it cannot be done now, nothing was changed.

    `kept_keys`: weights that stay even when their last user leaves, because loads in line have them in common.
    """
    serving = [each for each in state.loaded.values() if each.is_serving]
    trims = _trims(state, serving)
    rest_bytes = deficit_bytes - sum(num_bytes for _, num_bytes in trims)
    victims: tuple[Record, ...] = ()
    sleepers: tuple[Record, ...] = ()
    reason = ""
    if rest_bytes > 0:
        choice = VictimChoice(state, kept_keys, {each.name: num_bytes for each, num_bytes in trims})
        found = choice.find(serving, rest_bytes, may_drain_busy=may_drain_busy)
        if found is None:
            sleepers = _sleepers(state, record, rest_bytes)
            rest_bytes -= state.memory.asleep_bytes(each.name for each in sleepers)
            found = choice.find(serving, rest_bytes, may_drain_busy=may_drain_busy) if rest_bytes > 0 else ((), "")
        if found is None:
            return False
        victims, reason = found
    for sleeper in sleepers:
        deficit_bytes -= state.memory.asleep_bytes([sleeper.name])
        evict(state, sleeper, f"what it kept of the engine's memory was needed for {record.name!r}")
    gone = dict(state.leaving)
    for victim in victims:
        deficit_bytes -= state.memory.freed_bytes(victim.name, gone, kept_keys) - state.ordered_trim_bytes(victim)
        gone[victim.name] = victim
    _order_trims(state, [trim for trim in trims if trim[0] not in victims], deficit_bytes)
    for victim in victims:
        evict(state, victim, f"evicted for {record.name!r}: {reason}")
    return True


def _sleepers(state: HubState, record: Record, num_bytes: int) -> tuple[Record, ...]:
    """Models in host memory that give back so much of what they have left in the engine's, or all that there are."""
    found: list[Record] = []
    for other in resting_in_host(state, record):
        left_bytes = state.memory.asleep_bytes([other.name])
        if num_bytes > 0 and left_bytes:
            found.append(other)
            num_bytes -= left_bytes
    return tuple(found)


def sweep(state: HubState) -> None:
    """Above the high watermark: trims and evicts idle models down to the low one, as far as there are any.

    What waiting loads were promised counts as used, what is on its way out as free. Pinned models, last copies and the
    one that was used last stay.
    """
    if not state.is_above_high_watermark():
        return
    budget_bytes = state.config.budget_bytes
    level_bytes = budget_bytes - state.spare_bytes() + state.promised_bytes
    if level_bytes <= state.config.high_watermark * budget_bytes:
        return
    deficit_bytes = math.ceil(level_bytes - state.config.low_watermark * budget_bytes)
    serving = [each for each in state.loaded.values() if each.is_serving]
    idle = [each for each in serving if is_idle(each)]
    deficit_bytes -= _order_trims(state, _trims(state, idle), deficit_bytes)
    if deficit_bytes <= 0 or not serving:
        return
    newest = max(serving, key=lambda each: (each.entry.last_used_s, each.number))
    choice = VictimChoice(state)
    candidates = [
        choice.candidate(each)
        for each in idle
        if each is not newest and not each.entry.residency.keep_last_copy and state.is_evictable(each)
    ]
    chosen = state.choose(candidates, deficit_bytes)
    names = [each.name for each in candidates if each.freed_bytes > 0] if chosen is None else chosen.names
    used = f"{describe_bytes(level_bytes)} of {describe_bytes(budget_bytes)} were in use, above the high watermark"
    for name in names:
        victim = state.records[name]
        evict(state, victim, f"{used}; idle for {state.now_s - victim.entry.last_used_s:.3g} s")


def told_of_kv(state: HubState, record: Record, kv_bytes: int) -> None:
    """A model's committed KV has changed; that ends an order to trim it."""
    before_bytes = state.memory.kv_bytes(record.name)
    state.memory.set_kv(record.name, kv_bytes)
    record.entry.kv_bytes = state.memory.kv_bytes(record.name)
    if record.trim_bytes:
        if before_bytes - kv_bytes < record.trim_bytes:
            record.no_trim_until_s = state.now_s + _TRIM_PATIENCE_S
        record.trim_bytes = 0
        state.trimming.pop(record.name, None)


def _trims(state: HubState, serving: Sequence[Record]) -> list[tuple[Record, int]]:
    """KV above the floors that may be given up: of idle models first, of the least recently used first."""
    trims = [
        (each, state.memory.spare_kv_bytes(each.name))
        for each in serving
        if not state.ordered_trim_bytes(each) and state.now_s >= each.no_trim_until_s
    ]
    trims = [trim for trim in trims if trim[1] > 0]
    return sorted(trims, key=lambda trim: (not is_idle(trim[0]), trim[0].entry.last_used_s, trim[0].name))


def _order_trims(state: HubState, trims: Sequence[tuple[Record, int]], num_bytes: int) -> int:
    """Orders as much of the trims as is needed; returns how much."""
    ordered_bytes = 0
    for record, spare_bytes in trims:
        if ordered_bytes >= num_bytes:
            break
        record.trim_bytes = min(spare_bytes, num_bytes - ordered_bytes)
        record.trim_until_s = state.now_s + _TRIM_PATIENCE_S
        state.trimming[record.name] = record
        ordered_bytes += record.trim_bytes
        state.actions.append(TrimKV(record.name, record.trim_bytes))
    return ordered_bytes
