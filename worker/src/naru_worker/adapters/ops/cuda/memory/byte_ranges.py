"""A set of byte positions, kept as disjoint ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Range = tuple[int, int]
"""(first byte, byte behind the last)."""


class ByteRanges:
    """Ranges that touch are one. Not thread-safe."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._stops, strict=True)

    @property
    def num_bytes(self) -> int:
        """Positions in the set."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Puts [start, stop) in."""
        if start >= stop:
            return
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Takes [start, stop) out."""
        if start >= stop:
            return
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if first >= last:
            return
        rest = [(self._starts[first], start), (stop, self._stops[last - 1])]
        kept = [(a, b) for a, b in rest if a < b]
        self._starts[first:last], self._stops[first:last] = [a for a, _ in kept], [b for _, b in kept]

    def touches(self, start: int, stop: int) -> bool:
        """Whether any position of [start, stop) is in the set."""
        at = bisect_right(self._stops, start)
        return start < stop and at < len(self._starts) and self._starts[at] < stop

    def covers(self, start: int, stop: int) -> bool:
        """Whether all positions of [start, stop) are in the set."""
        at = bisect_right(self._stops, start)
        return start >= stop or (at < len(self._starts) and self._starts[at] <= start and stop <= self._stops[at])
