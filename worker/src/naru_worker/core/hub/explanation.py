"""Says why a model is where it is, in sentences with numbers. Reads the hub's state, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from naru_worker.core.hub.eviction import describe_bytes, describe_seconds
from naru_worker.core.hub.model import Tier
from naru_worker.core.hub.records import Place, Record
from naru_worker.core.hub.state import HubState
from naru_worker.core.residency import ModelState

_MAX_BLOCKERS = 8


def explain(state: HubState, record: Record) -> tuple[str, ...]:
    """Sentences, most important first: state, wish, what it waits for, failure, eviction, bytes, sharing."""
    return tuple(
        sentence
        for part in (_state, _wish, _failure, _wait, _eviction, _bytes, _requests)
        for sentence in part(state, record)
    )


def _state(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    since = describe_seconds(state.now_s - entry.state_since_s)
    yield f"It is {entry.state.name} since {since}" + (f": {record.why}." if record.why else ".")
    if record.is_stopping:
        yield "Its operation under way was told to stop."


def _wish(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    if entry.spec is None:
        yield f"Nobody wants it: generation {entry.generation} released it."
        return
    residency = entry.residency
    traits = [
        text
        for is_so, text in (
            (residency.pinned, "pinned"),
            (residency.keep_last_copy, "kept as a last copy"),
            (residency.priority != 100, f"priority {residency.priority}"),
            (residency.min_residency_s > 0, f"minimum residency {describe_seconds(residency.min_residency_s)}"),
            (residency.idle_ttl_s > 0, f"idle limit {describe_seconds(residency.idle_ttl_s)}"),
        )
        if is_so
    ]
    yield (
        f"Generation {entry.generation} asks for tier {entry.tier.name}" + "".join(f", {each}" for each in traits) + "."
    )
    if record.is_moved and record.goal is not entry.tier:
        yield f"It was moved to tier {record.goal.name} since, as its load or the room on other workers asked for."
    if record.wanted > max(entry.tier, record.goal):
        yield f"It is wanted at tier {record.wanted.name} because requests came for it."
    elif record.wanted < entry.tier and not record.is_failed and not record.is_moved:
        yield f"It rests at tier {record.wanted.name} by the worker's own decision; the next request brings it up."
    if entry.loaded_spec is not None and record.is_other_copy:
        yield "What is in memory is an older copy, which leaves first."


def _failure(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    if not record.is_failed:
        return
    if record.is_without_room:
        yield f"It has no room: {entry.error}."
        return
    left = describe_seconds(max(0.0, entry.retry_at_s - state.now_s))
    yield f"It failed {entry.num_failures} times in a row: {entry.error}."
    if record.is_permanent:
        yield f"Trying again cannot help; the failure is forgotten in {left}, or when a newer generation asks."
    else:
        yield f"It is not tried again for another {left}."


def _wait(state: HubState, record: Record) -> Iterator[str]:
    name = record.name
    if record.wait_reason:
        yield record.wait_reason[0].upper() + record.wait_reason[1:] + "."
    if name in state.host_waiters:
        yield "It is drained and waits for room in host memory before it unloads."
    if name in state.fetches:
        slots = f"{state.num_fetches} of {state.config.max_fetches} fetches are under way"
        yield f"It waits to be fetched: {slots}, {state.fetches.position(name)} models are before it."
    if name in state.loads:
        slots = f"{state.num_loads} of {state.config.max_loads} loads are under way"
        yield f"It waits to be loaded: {slots}, {state.loads.position(name)} models are before it."
        if record.wanted is Tier.ACTIVE:
            yield from _room(state, record)


def _room(state: HubState, record: Record) -> Iterator[str]:
    footprint = record.entry.footprint
    assert footprint is not None, "whatever waits for a load was fetched"
    need, free = state.memory.load_bytes(record.name, footprint), max(0, state.memory.free_bytes)
    coming = state.spare_bytes() - state.memory.free_bytes
    yield f"It needs {need} bytes, {free} are free and {coming} are on their way."
    if need <= free:
        return
    blockers = [_why_it_stays(state, other) for other in state.loaded.values()]
    more = len(blockers) - _MAX_BLOCKERS
    yield from blockers[:_MAX_BLOCKERS]
    if more > 0:
        yield f"And {more} more models are loaded."


def _why_it_stays(state: HubState, other: Record) -> str:
    entry = other.entry
    guard_s = state.guarded_until_s(other) - state.now_s
    if other.name in state.leaving:
        reason = f"is on its way out, with {entry.num_in_flight} requests in flight"
    elif entry.residency.pinned:
        reason = "is pinned"
    elif entry.num_in_flight:
        reason = f"has {entry.num_in_flight} requests in flight"
        if guard_s > 0:
            reason += f" and may not be evicted for another {describe_seconds(guard_s)}"
    elif guard_s > 0:
        reason = f"has its minimum residency for another {describe_seconds(guard_s)}"
    else:
        reason = "may be evicted"
    return f"{other.name!r} {reason}."


def _eviction(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    if record.eviction:
        yield f"It is being evicted: {record.eviction}."
    if entry.last_eviction:
        age = describe_seconds(state.now_s - entry.last_eviction_s)
        yield f"It was last evicted {age} ago: {entry.last_eviction}."


def _bytes(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    footprint = entry.footprint
    if footprint is not None:
        in_memory = {Place.HOST: "in host memory", Place.LOADED: "in the engine", Place.DRAINED: "in the engine"}
        where = in_memory.get(record.place, "not in memory")
        yield (
            f"Its weights are {describe_bytes(footprint.weight_bytes)} ({where}), its KV floor "
            f"{describe_bytes(footprint.kv_floor_bytes)}, its workspace {describe_bytes(footprint.workspace_bytes)}; "
            f"KV committed now: {describe_bytes(entry.kv_bytes)}."
        )
    sharers = state.memory.sharers(record.name)
    if sharers:
        yield f"It shares its weights with {', '.join(repr(name) for name in sharers[:_MAX_BLOCKERS])}."
    unreturned = state.memory.unreturned_bytes
    if unreturned:
        yield f"{describe_bytes(unreturned)} of this worker's memory were not returned by unloads and stay booked."


def _requests(state: HubState, record: Record) -> Iterator[str]:
    entry = record.entry
    if entry.num_held:
        waited = describe_seconds(state.now_s - entry.held_since_s)
        yield f"{entry.num_held} requests wait for it, the oldest for {waited}."
    if entry.state is ModelState.ACTIVE or entry.num_in_flight:
        yield f"{entry.num_in_flight} requests are in flight."
    elif entry.state is ModelState.READY:
        yield f"It is idle for {describe_seconds(state.now_s - entry.last_used_s)}."
