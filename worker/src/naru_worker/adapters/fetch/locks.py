"""Locks on small files that the processes of a node share. Called by the cache; knows nothing of models.

The kernel frees a lock when its holder dies, so nothing a dead process leaves behind can block anybody. A file may be
removed by whoever holds it alone: the others notice that the path names another file, and begin anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.05
"""How often a lock that another one holds is asked for again: the kernel tells nobody when it is free."""
_TELL_EVERY_POLLS = 10


class HeldLock:
    """A lock until it is closed, or nobody knows this object any more."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Lets go; again does nothing."""
        self._close()

    def touch(self) -> None:
        """Notes a use, held or not. A disk that refuses costs the order of eviction, no more."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def remove(self) -> None:
        """Removes the file and lets go; only of a lock that was taken alone."""
        self._path.unlink(missing_ok=True)
        self.close()


def try_lock(path: Path, *, shared: bool = False) -> HeldLock | None:
    """The lock if it is free now: alone, or together with others that share it.

    Raises:
        OSError: the file cannot be made or opened.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return HeldLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def wait_lock(path: Path, on_wait: Callable[[], None]) -> HeldLock:
    """The lock, alone; ``on_wait`` is called now and then meanwhile, and what it raises ends the wait.

    Raises:
        OSError: the file cannot be made or opened.
    """
    polls = 0
    while (held := try_lock(path)) is None:
        if polls % _TELL_EVERY_POLLS == 0:
            on_wait()
        polls += 1
        time.sleep(POLL_S)
    return held


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock, alone or shared; makes no file."""
    if not path.exists():
        return False
    held = try_lock(path)
    if held is not None:
        held.close()
    return held is None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
