"""Whether host memory has room for a model's weights, and which models leave it for that: the least recently used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from naru_worker.core.hub.model import Tier
from naru_worker.core.hub.records import Record
from naru_worker.core.hub.state import HubState


@dataclass(frozen=True, slots=True)
class HostRoom:
    """At most one of the two is true; neither: there is no room, and none can be made."""

    is_there: bool
    is_coming: bool
    """When models have left that are on their way out, `victims` included."""
    victims: tuple[Record, ...] = ()


def find_host_room(state: HubState, record: Record, num_bytes: int) -> HostRoom:
    """Room for `num_bytes`, as `record` would have it: only models of less value leave, and no more than needed."""
    memory = state.memory
    missing_bytes = num_bytes - memory.host_free_bytes
    if num_bytes <= 0 or missing_bytes <= 0:
        return HostRoom(True, False)
    if num_bytes > memory.host_budget_bytes:
        return HostRoom(False, False)
    leaving = dict(state.dropping)
    if memory.host_freed_bytes(leaving) >= missing_bytes:
        return HostRoom(False, True)
    victims: list[Record] = []
    limit = state.host_rank(record)[:2]
    for victim in resting_in_host(state, record):
        if state.host_rank(victim)[:2] > limit:
            return HostRoom(False, False)
        victims.append(victim)
        leaving[victim.name] = victim
        if memory.host_freed_bytes(leaving) >= missing_bytes:
            break
    else:
        return HostRoom(False, False)
    for victim in reversed(tuple(victims)):
        del leaving[victim.name]
        if memory.host_freed_bytes(leaving) >= missing_bytes:
            victims.remove(victim)
        else:
            leaving[victim.name] = victim
    return HostRoom(False, True, tuple(victims))


def resting_in_host(state: HubState, record: Record) -> Iterator[Record]:
    """Models in host memory that may leave it for another one, least valuable first."""
    for name in state.in_host:
        other = state.records[name]
        is_resting = other.operation is None and other.wanted < Tier.ACTIVE and not other.entry.residency.pinned
        if is_resting and other is not record:
            yield other
