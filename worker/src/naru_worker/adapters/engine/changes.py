"""What has happened to models and was not told yet: written by the hub's shell, emptied by whoever tells the route map.

Asyncio thread only.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass

from naru_worker.core.hub.actions import Changed
from naru_worker.core.residency import ModelState

MAX_CHANGES = 1000
"""Kept while nobody can be told; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """One change of a model's state, for whoever follows: READY stands for ACTIVE, too."""

    number: int
    """Counts up from 1."""
    model: str
    old: ModelState
    new: ModelState
    reason: str
    at_s: float
    """Unix seconds."""


class ChangeLog:
    """Changes, oldest first."""

    def __init__(self) -> None:
        self._changes: deque[ChangeEvent] = deque(maxlen=MAX_CHANGES)
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Changed) -> None:
        """It has happened now."""
        self._num_changes += 1
        old, new = (ModelState.READY if state.is_serving else state for state in (change.old, change.new))
        self._changes.append(ChangeEvent(self._num_changes, change.model, old, new, change.reason, time.time()))

    def oldest(self, count: int) -> list[ChangeEvent]:
        """The first ones that were not told."""
        return list(itertools.islice(self._changes, count))

    def told(self, number: int) -> None:
        """All up to this number were told."""
        while self._changes and self._changes[0].number <= number:
            self._changes.popleft()
