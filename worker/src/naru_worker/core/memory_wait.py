"""How an engine waits for KV memory that other models hold: when it looks again, and when the wait is too long.

Kept by the model's engine. Times are seconds of any one clock that only goes forward.
"""

from __future__ import annotations

RETRY_S = 0.02
"""Prefixes that others keep come free without a booking: look again after so long even if none was seen."""
LEAST_RETRY_S = 0.002
"""Bookings of others may come in every step: they make nobody look more often than this."""


class MemoryWait:
    """Begins with the first plan that is starved, and ends with the first that is not."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: a request may wait so long for memory while its model can run nothing at all."""
        self.limit_s = limit_s
        self._since_s: float | None = None
        self._looked_s = 0.0
        self._version = 0
        self._is_hurried = False

    @property
    def is_waiting(self) -> bool:
        """Whether the last plan was starved."""
        return self._since_s is not None

    @property
    def wake_s(self) -> float:
        """When to look again at the latest."""
        return self._looked_s if self._is_hurried else self._looked_s + RETRY_S

    def begin(self, now_s: float, version: int) -> None:
        """A plan was starved, at this version of the ledger; an older wait goes on."""
        if self._since_s is None:
            self._since_s = now_s
        self._looked_s, self._version, self._is_hurried = now_s, version, False

    def end(self) -> None:
        """A plan had something to run, or nothing is left to wait."""
        self._since_s = None

    def hurry(self) -> None:
        """What waits has changed: look again at once."""
        self._is_hurried = True

    def is_due(self, now_s: float, version: int) -> bool:
        """Whether to look again, with the ledger at this version."""
        if now_s >= self.wake_s:
            return True
        return version != self._version and now_s >= self._looked_s + LEAST_RETRY_S

    def is_over(self, now_s: float, arrived_s: float) -> bool:
        """Whether a request that arrived then has waited for memory as long as it may."""
        return self._since_s is not None and now_s - max(self._since_s, arrived_s) >= self.limit_s
