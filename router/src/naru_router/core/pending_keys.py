"""Which prompts are being computed right now, so that no worker tells their keys yet: this router's own.

A burst of requests that begin alike comes within the time that the first of them takes: without this, each would be
sent where it costs least just then, and each worker would compute the same beginning. Used by the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_ALIKE = 64
"""Prompts remembered of those that have their first chunk in common; the oldest are forgotten."""

_Entry = tuple[str, tuple[bytes, ...]]


class PendingKeys:
    """Requests without output, by the first of their keys. Mutable. Keys name model and tenant, too."""

    def __init__(self) -> None:
        self._alike: dict[bytes, dict[str, _Entry]] = {}

    def add(self, request_id: str, worker_id: str, keys: tuple[bytes, ...]) -> None:
        """A request was sent to a worker."""
        if not keys:
            return
        entries = self._alike.setdefault(keys[0], {})
        entries[request_id] = worker_id, keys
        if len(entries) > MAX_ALIKE:
            del entries[next(iter(entries))]

    def remove(self, request_id: str, keys: tuple[bytes, ...]) -> None:
        """It has had output, or has ended; again: nothing."""
        entries = self._alike.get(keys[0]) if keys else None
        if entries is not None and entries.pop(request_id, None) is not None and not entries:
            del self._alike[keys[0]]

    def with_pending(self, keys: Sequence[bytes], held: Mapping[str, int]) -> Mapping[str, int]:
        """Leading keys by worker: those that it holds, or is about to."""
        entries = self._alike.get(keys[0]) if keys else None
        if not entries:
            return held
        merged = dict(held)
        for worker_id, other in entries.values():
            known = merged.get(worker_id, 0)
            if known < len(keys) and known < len(other) and keys[known] == other[known]:
                merged[worker_id] = _num_common(keys, other, known + 1)
        return merged


def _num_common(keys: Sequence[bytes], other: Sequence[bytes], low: int) -> int:
    """Leading keys that both have; at least `low`. Keys are chained: where one is equal, all before it are."""
    high = min(len(keys), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
