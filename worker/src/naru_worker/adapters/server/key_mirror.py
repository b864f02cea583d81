"""What one load of a model has told of its route keys: all that it holds, and the last changes, for any reader's pace.

Kept by the teller for all streams of a worker together. A reader remembers a place in the changes; one that comes too
late for them takes everything anew. Asyncio thread only.
"""

from __future__ import annotations

from itertools import islice

from naru_worker.adapters.engine.loaded import LoadedModel
from naru_worker.core.route_marks import KeyChanges, NetChanges

MAX_CHANGES = 16_384
"""Kept for readers that lag behind: about 2 MB. Past half of them, a fresh snapshot is hardly longer."""


class KeyMirror:
    """The keys of one load."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.epoch = 0
        """Number of the load, once it is known: keys told under another one are void."""
        self.held: dict[bytes, None] = {}
        self._changes: list[tuple[bytes, bool]] = []
        """(key, whether it came), the last ones."""
        self._num_dropped = 0

    @property
    def place(self) -> int:
        """Where a reader stands that knows all."""
        return self._num_dropped + len(self._changes)

    def refresh(self) -> None:
        """Takes what the engine has told meanwhile."""
        changes = self.model.engine.key_news.take()
        for key in changes.removed:
            self.held.pop(key, None)
            self._changes.append((key, False))
        for key in changes.added:
            self.held[key] = None
            self._changes.append((key, True))
        num_surplus = len(self._changes) - MAX_CHANGES
        if num_surplus > 0:
            # Half at once: what is dropped one by one is moved each time.
            num_surplus += MAX_CHANGES // 2
            del self._changes[:num_surplus]
            self._num_dropped += num_surplus

    def since(self, place: int) -> KeyChanges | None:
        """Net changes behind a place; None: too many, start with `held`."""
        if place < self._num_dropped:
            return None
        net = NetChanges()
        for key, has_come in islice(self._changes, place - self._num_dropped, None):
            if has_come:
                net.add(key)
            else:
                net.remove(key)
        return net.take()
