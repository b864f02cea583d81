"""The bytes of one worker's budget: who holds how many. The one place where "is there room" is answered for good.

Booked by the model hub (weights, workspace: asyncio thread and loading threads) and by the engines as KV caches grow
and shrink (engine thread), hence the lock. A booking that does not fit is refused; nothing is ever overbooked.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerView:
    """All bookings at one instant, in bytes. Their sum is at most `budget_bytes`."""

    budget_bytes: int
    fixed: dict[str, int]
    """By owner: weights, workspace, private bytes, bytes not returned."""
    kv: dict[str, int]
    """By model: committed KV."""

    @property
    def used_bytes(self) -> int:
        """All bookings."""
        return sum(self.fixed.values()) + sum(self.kv.values())

    @property
    def free_bytes(self) -> int:
        """What can still be booked."""
        return self.budget_bytes - self.used_bytes


class MemoryLedger:
    """Thread-safe; every method is a few additions under one lock."""

    def __init__(self, budget_bytes: int, soft_ratio: float = 1.0) -> None:
        """`soft_ratio`: share of the budget above which KV grows only where it must, in [0, 1].

        Raises:
            ValueError: a number is out of range.
        """
        if budget_bytes < 0 or not 0.0 <= soft_ratio <= 1.0:
            raise ValueError(
                f"budget_bytes is {budget_bytes!r} and soft_ratio {soft_ratio!r}; 0 or more, and [0, 1], are needed"
            )
        self._lock = threading.Lock()
        self._budget_bytes = budget_bytes
        self._soft_bytes = int(budget_bytes * soft_ratio)
        self._fixed: dict[str, int] = {}
        self._kv: dict[str, int] = {}
        self._used_bytes = 0
        self._version = 0

    @property
    def budget_bytes(self) -> int:
        """What may be booked in all."""
        return self._budget_bytes

    @property
    def version(self) -> int:
        """Changes with every booking; read without the lock."""
        return self._version

    def free_bytes(self) -> int:
        """What can be booked now."""
        return self._budget_bytes - self._used_bytes

    def fixed_bytes(self, owner: str) -> int:
        """An owner's fixed bytes."""
        return self._fixed.get(owner, 0)

    def kv_bytes(self, model: str) -> int:
        """A model's committed KV."""
        return self._kv.get(model, 0)

    def book(self, owner: str, num_bytes: int) -> bool:
        """Adds to an owner's fixed bytes. False: no room, nothing changed."""
        return self._add(self._fixed, owner, num_bytes, self._budget_bytes)

    def book_all(self, fixed: dict[str, int], kv: dict[str, int]) -> bool:
        """Adds to several owners at once, by owner and by model. False: no room for all, nothing changed."""
        total = sum(fixed.values()) + sum(kv.values())
        assert min([0, *fixed.values(), *kv.values()]) == 0, "bookings are not negative"
        with self._lock:
            if self._used_bytes + total > self._budget_bytes:
                return False
            for books, more in ((self._fixed, fixed), (self._kv, kv)):
                for owner, num_bytes in more.items():
                    books[owner] = books.get(owner, 0) + num_bytes
            self._used_bytes += total
            self._version += 1
            return True

    def unbook(self, owner: str, num_bytes: int | None = None) -> int:
        """Takes from an owner's fixed bytes, all of them by default; returns how many."""
        return self._take(self._fixed, owner, num_bytes)

    def book_kv(self, model: str, num_bytes: int, *, is_urgent: bool = True) -> bool:
        """Adds to a model's KV bytes. Not urgent: only below the soft limit. False: no room, nothing changed."""
        return self._add(self._kv, model, num_bytes, self._budget_bytes if is_urgent else self._soft_bytes)

    def unbook_kv(self, model: str, num_bytes: int | None = None) -> int:
        """Takes from a model's KV bytes, all of them by default; returns how many."""
        return self._take(self._kv, model, num_bytes)

    def unbook_all(self, fixed: Sequence[str], kv: Sequence[str], *, kept_as: str, kept_bytes: int) -> int:
        """Takes all bytes of owners and models at once, but for so many that go over to `kept_as`; returns how many.

        In one step: what is kept must not compete with others for the room just made.
        """
        with self._lock:
            taken = sum(self._fixed.pop(owner, 0) for owner in fixed) + sum(self._kv.pop(model, 0) for model in kv)
            kept = min(kept_bytes, taken)
            if kept:
                self._fixed[kept_as] = self._fixed.get(kept_as, 0) + kept
            self._used_bytes -= taken - kept
            self._version += 1
            return taken - kept

    def view(self) -> LedgerView:
        """A consistent copy."""
        with self._lock:
            return LedgerView(self._budget_bytes, dict(self._fixed), dict(self._kv))

    def _add(self, books: dict[str, int], owner: str, num_bytes: int, limit_bytes: int) -> bool:
        assert num_bytes >= 0, "bookings are not negative"
        with self._lock:
            if num_bytes > 0 and self._used_bytes + num_bytes > limit_bytes:
                return False
            books[owner] = books.get(owner, 0) + num_bytes
            self._used_bytes += num_bytes
            self._version += 1
            return True

    def _take(self, books: dict[str, int], owner: str, num_bytes: int | None) -> int:
        with self._lock:
            held = books.get(owner, 0)
            taken = held if num_bytes is None else num_bytes
            assert 0 <= taken <= held, "more bytes are given back than were booked"
            if taken == held:
                books.pop(owner, None)
            else:
                books[owner] = held - taken
            self._used_bytes -= taken
            self._version += 1
            return taken
