"""Names in the order in which they are served. Sorted by an explicit rank; used by the hub for fetches and loads."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Rank = tuple[int, float, int]
"""(class, since, number): lower is sooner. Numbers are unique, so that no two ranks are equal."""


class WaitQueue:
    """Mutable. Adding and removing cost a search and a move of pointers, the first in line nothing."""

    def __init__(self) -> None:
        self._order: list[tuple[Rank, str]] = []
        self._ranks: dict[str, Rank] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: str) -> bool:
        return name in self._ranks

    def put(self, name: str, rank: Rank) -> None:
        """Adds a name, or moves it to a new rank."""
        if self._ranks.get(name) == rank:
            return
        self.remove(name)
        self._ranks[name] = rank
        insort(self._order, (rank, name))

    def remove(self, name: str) -> None:
        """Takes a name out; it need not be there."""
        rank = self._ranks.pop(name, None)
        if rank is not None:
            del self._order[bisect_left(self._order, (rank, name))]

    def first(self, limit: int) -> Iterator[str]:
        """The first `limit` names in order, as they stand now."""
        return iter([name for _, name in self._order[:limit]])

    def __iter__(self) -> Iterator[str]:
        """All in order; not to be changed meanwhile."""
        return (name for _, name in self._order)

    def position(self, name: str) -> int:
        """How many are before it."""
        return bisect_left(self._order, (self._ranks[name], name))
