"""An ordered set of sequences: sooner is lower priority number, then lower arrival number, then lower choice index.

The scheduler keeps two, running and waiting. The order never depends on when a sequence came in, so that a preempted
one is back at the front of its class.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from naru_worker.core.request import Sequence


def order_key(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key: lower is served sooner and preempted later."""
    request = sequence.request
    return (request.priority, request.arrival, sequence.index)


class SequenceQueue:
    """Sorted list of sequences: O(log n) comparisons to add or remove, O(1) to look at either end."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]

    def add(self, sequence: Sequence) -> None:
        """Inserts at its place; behind those with an equal key."""
        insort(self._items, sequence, key=order_key)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in the queue."""
        items = self._items
        index = bisect_left(items, order_key(sequence), key=order_key)
        # Arrivals are unique by contract; should two be equal, identity decides.
        while items[index] is not sequence:
            index += 1
        del items[index]

    def pop(self, index: int = -1) -> Sequence:
        """Takes out by place; the default is the last: least important, newest."""
        return self._items.pop(index)
