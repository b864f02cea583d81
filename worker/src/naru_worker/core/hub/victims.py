"""Who may be evicted for whom: the candidates that the policy chooses from, from the hub's records."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from naru_worker.core.hub.accounts import PageKey
from naru_worker.core.hub.eviction import Candidate
from naru_worker.core.hub.records import Record
from naru_worker.core.hub.state import HubState

Found = tuple[tuple[Record, ...], str]
"""Victims in order, and the reason."""


def is_idle(record: Record) -> bool:
    """Whether no request runs on it or waits for it."""
    return not record.entry.num_in_flight and not record.entry.num_held


class VictimChoice:
    """One choice over the hub's state as it is; keeps nothing.

    `kept_keys`: weights that stay even when their last user leaves. `trims`: KV bytes by model that are counted
    elsewhere already.
    """

    def __init__(
        self, state: HubState, kept_keys: Collection[PageKey] = (), trims: Mapping[str, int] | None = None
    ) -> None:
        self._state = state
        self._kept_keys = kept_keys
        self._trims = trims or {}

    def candidate(self, record: Record, gone: Collection[str] | None = None) -> Candidate:
        """`gone`: models that leave as well; those on their way out by default."""
        state, entry = self._state, record.entry
        freed_bytes = state.memory.freed_bytes(entry.name, state.leaving if gone is None else gone, self._kept_keys)
        counted_bytes = self._trims.get(entry.name, 0)
        if record.trim_bytes:
            counted_bytes += state.ordered_trim_bytes(record)
        return Candidate(
            name=entry.name,
            idle_s=state.now_s - entry.last_used_s,
            freed_bytes=freed_bytes - counted_bytes,
            reload_s=state.reload_s(record),
            priority=entry.residency.priority,
            is_last_copy=entry.residency.keep_last_copy,
            uses=record.uses,
            popularity=record.popularity_now(state.now_s, state.config.popularity_half_life_s),
        )

    def find(self, serving: Sequence[Record], num_bytes: int, *, may_drain_busy: bool) -> Found | None:
        """Victims among idle models; among busy ones only for what all the idle ones together do not give."""
        evictable = [each for each in serving if self._state.is_evictable(each)]
        idle = [each for each in evictable if is_idle(each)]
        found = self._choose(idle, num_bytes)
        if found is not None or not may_drain_busy:
            return found
        idle_bytes = self._joint_bytes(idle)
        busy = [each for each in evictable if not is_idle(each)]
        found = self._choose(busy, num_bytes - idle_bytes)
        if found is None:
            return None
        victims, reason = found
        rest_bytes = num_bytes - self._joint_bytes(victims)
        if rest_bytes <= 0:
            return found
        also = self._choose(idle, rest_bytes)
        also_idle, also_reason = (tuple(idle), "all idle ones leave as well") if also is None else also
        return (*also_idle, *victims), f"{reason}; {also_reason}"

    def _choose(self, records: Sequence[Record], num_bytes: int) -> Found | None:
        """One by one where that suffices, else models with common weights together."""
        by_name: dict[str, tuple[Record, ...]] = {each.name: (each,) for each in records}
        victims = self._state.choose([self.candidate(each) for each in records], num_bytes)
        if victims is None:
            groups = self._groups(records)
            if len(groups) == len(records):
                return None
            by_name = {group[0].name: group for group in groups}
            victims = self._state.choose([self._group_candidate(group) for group in groups], num_bytes)
        if victims is None:
            return None
        return tuple(record for name in victims.names for record in by_name[name]), victims.reason

    def _groups(self, records: Sequence[Record]) -> list[tuple[Record, ...]]:
        members_by_name = {each.name: each for each in records}
        groups: dict[str, tuple[Record, ...]] = {}
        for record in records:
            users = [name for name in self._state.memory.users(record.name) if name not in self._state.leaving]
            is_group = all(user in members_by_name for user in users)
            members = tuple(members_by_name[user] for user in users) if is_group else (record,)
            groups.setdefault(members[0].name, members)
        return list(groups.values())

    def _group_candidate(self, group: tuple[Record, ...]) -> Candidate:
        candidates = [self.candidate(each) for each in group]
        return replace(
            candidates[0],
            idle_s=min(each.idle_s for each in candidates),
            freed_bytes=self._joint_bytes(group),
            reload_s=sum(each.reload_s for each in candidates),
            priority=max(each.priority for each in candidates),
            is_last_copy=any(each.is_last_copy for each in candidates),
            uses=sum(each.uses for each in candidates),
            popularity=sum(each.popularity for each in candidates),
        )

    def _joint_bytes(self, records: Sequence[Record]) -> int:
        """What comes free when all of them leave."""
        gone = dict(self._state.leaving)
        freed_bytes = 0
        for record in records:
            freed_bytes += self.candidate(record, gone).freed_bytes
            gone[record.name] = record
        return freed_bytes
