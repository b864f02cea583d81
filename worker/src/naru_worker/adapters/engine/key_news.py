"""Route keys on their way from the engine thread to the asyncio thread, as one net change however long nobody takes it.

The engine puts in what each of its turns has changed; the server takes it for all routers at once. Never more than what
the cache held at the last taking and holds now.
"""

from __future__ import annotations

import threading

from naru_worker.core.route_marks import KeyChanges, NetChanges

_NOTHING = KeyChanges()


class KeyNews:
    """One model's. `put` and `take` may be called from different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes = NetChanges()

    def put(self, changes: KeyChanges) -> None:
        """Adds what has changed since the last `put`."""
        with self._lock:
            for key in changes.removed:
                self._changes.remove(key)
            for key in changes.added:
                self._changes.add(key)

    def take(self) -> KeyChanges:
        """What has changed since the last `take`."""
        if not self._changes:
            return _NOTHING  # a glance without the lock: what is put in this moment is taken the next time
        with self._lock:
            return self._changes.take()
