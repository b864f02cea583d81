"""Which waiting inputs of a model that does not generate run together now, or when to look again.

Asked by the batch engine between two batches. An input is never cut, but those of one request may run in different
batches. The first in line is part of every batch, so that none starves; beside it, inputs of about its size may
overtake others of their priority, by a few batches at most. It knows no clock and no model.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

MAX_SCAN = 1024
"""Inputs looked at for mates of the first: those of other shapes may stand between them."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Of one model."""

    max_rows: int
    """Places of a batch, at least 1."""
    max_delay_s: float
    """The first of a batch waits so long for more; 0: not at all."""
    max_size: int = 0
    """Tokens of a batch; 0: any number. One input alone may have more."""
    preferred_rows: tuple[int, ...] = ()
    """A batch that has one of these does not wait."""
    window: int = 1
    """Batches' worth of inputs among which those of like size are chosen; 1: strictly in order."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One waiting input."""

    key: int
    rank: tuple[int, int]
    """Priority, then arrival: lower is sooner, and no two are equal."""
    since_s: float
    """When it came here."""
    size: int
    """Tokens: what it costs."""
    rows: int = 1
    """Places it takes."""
    group: Hashable = ()
    """Only equal ones share a batch."""
    has_run: bool = False
    """In a batch that failed: it waits for nobody."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What to do now."""

    items: tuple[BatchItem, ...]
    """To be run together; none: nothing runs yet."""
    look_s: float | None = None
    """When to look again, where nothing runs; None: not before something comes."""


def plan_batch(items: Sequence[BatchItem], oldest_s: float, limits: BatchLimits, now_s: float) -> BatchPlan:
    """What runs at `now_s` of `items`, which are in the order of their ranks; the first that came did so `oldest_s`."""
    if not items:
        return BatchPlan(())
    mates = _mates(items, limits)
    batch = _filled(mates, limits, limits.max_rows)
    due_s = oldest_s + limits.max_delay_s
    is_due = now_s >= due_s or items[0].has_run
    if is_due or len(batch) < len(mates) or _has_all_it_takes(batch, limits):
        return BatchPlan(_of_like_size(mates, batch, limits))
    rows = sum(item.rows for item in batch)
    preferred = max((size for size in limits.preferred_rows if size <= rows), default=0)
    if preferred:
        return BatchPlan(_filled(mates, limits, preferred))
    return BatchPlan((), due_s)


def _mates(items: Sequence[BatchItem], limits: BatchLimits) -> list[BatchItem]:
    """The first in line and those that could go with it, in order; a few batches' worth."""
    found, rows = [], 0
    for index in range(min(len(items), MAX_SCAN)):
        item = items[index]
        if item.group == items[0].group:
            found.append(item)
            rows += item.rows
            # One more than fits shows that a batch is full.
            if rows > limits.max_rows * limits.window:
                break
    return found


def _filled(mates: Sequence[BatchItem], limits: BatchLimits, max_rows: int) -> tuple[BatchItem, ...]:
    """In order, up to the first that does not fit; the very first always does."""
    rows = size = count = 0
    for item in mates:
        rows, size = rows + item.rows, size + item.size
        if count and (rows > max_rows or 0 < limits.max_size < size):
            break
        count += 1
    return tuple(mates[:count])


def _has_all_it_takes(batch: Sequence[BatchItem], limits: BatchLimits) -> bool:
    """Whether nothing more could join."""
    is_long = 0 < limits.max_size <= sum(item.size for item in batch)
    return is_long or sum(item.rows for item in batch) >= limits.max_rows


def _of_like_size(
    mates: Sequence[BatchItem], batch: tuple[BatchItem, ...], limits: BatchLimits
) -> tuple[BatchItem, ...]:
    """A full batch of the first in line and those of its priority nearest to it in size, in order of their ranks."""
    head = mates[0]
    equals = [item for item in mates if item.rank[0] == head.rank[0]]
    if limits.window == 1 or len(equals) <= len(batch):
        return batch
    nearest = sorted(equals, key=lambda item: (item is not head, abs(item.size - head.size), item.rank))
    return tuple(sorted(_filled(nearest, limits, limits.max_rows), key=lambda item: item.rank))


class BatchQueue:
    """The waiting inputs of one model. Mutable; one thread."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.total_size = 0
        """Of all that wait."""
        self._by_key: dict[int, BatchItem] = {}
        """In the order they came."""
        self._ranked: list[BatchItem] = []
        self._due_s: float | None = None
        """From when on a batch runs; None: to be looked at again."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[BatchItem]:
        """In order of their ranks."""
        return iter(self._ranked)

    @property
    def first(self) -> BatchItem | None:
        """The next in line."""
        return self._ranked[0] if self._ranked else None

    @property
    def due_s(self) -> float | None:
        """From when on `plan` gives a batch, if nothing comes or goes; None: nothing waits."""
        if self._ranked and self._due_s is None:
            plan = plan_batch(self._ranked, self._oldest_s, self.limits, -math.inf)
            self._due_s = -math.inf if plan.items else plan.look_s
        return self._due_s

    def add(self, item: BatchItem) -> None:
        """Takes an input; `since_s` must not go back."""
        self._by_key[item.key] = item
        insort(self._ranked, item, key=_rank)
        self.total_size += item.size
        self._due_s = None

    def remove(self, key: int) -> BatchItem | None:
        """Takes an input out: it runs, or is wanted no more. None: it is not here."""
        item = self._by_key.pop(key, None)
        if item is not None:
            del self._ranked[bisect_left(self._ranked, item.rank, key=_rank)]
            self.total_size -= item.size
            self._due_s = None
        return item

    def plan(self, now_s: float) -> BatchPlan:
        """What to run; it stays here until it is removed."""
        return plan_batch(self._ranked, self._oldest_s, self.limits, now_s)

    @property
    def _oldest_s(self) -> float:
        return next(iter(self._by_key.values())).since_s if self._by_key else 0.0


def _rank(item: BatchItem) -> tuple[int, int]:
    return item.rank
