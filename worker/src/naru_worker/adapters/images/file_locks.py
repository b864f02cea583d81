"""Locks by name that threads and processes of one node share, and that end with their holder.

Used by the store. A lock is a `flock` on a small file: the kernel frees it when its holder dies, so nothing a dead
process leaves behind can block anybody. Released locks take their file with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from naru_worker.adapters.images.errors import LoadStopped

WAIT_POLL_S = 0.02
"""How often a lock that another process holds is asked for again: the kernel tells nobody when it is free."""


def try_lock(descriptor: int) -> bool:
    """Whether the open file's lock is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class FileLocks:
    """The locks of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def hold(self, name: str, should_stop: threading.Event) -> Iterator[None]:
        """Waits for the lock and holds it.

        Raises:
            LoadStopped: it was told to stop while it waited.
            OSError: the folder cannot be written.
        """
        path = self._folder / f"{name}.lock"
        descriptor = self._take(path, should_stop)
        try:
            yield
        finally:
            # Before the lock ends: whoever waits for it sees that its file is gone, and makes a new one.
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def clean(self) -> None:
        """Removes the files of dead holders."""
        for path in self._folder.glob("*.lock"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(descriptor) and _is_at(descriptor, path):
                        path.unlink()
                finally:
                    os.close(descriptor)

    def _take(self, path: Path, should_stop: threading.Event) -> int:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                while not try_lock(descriptor):
                    if should_stop.wait(WAIT_POLL_S):
                        raise LoadStopped(f"{path}: the load was told to stop while it waited for its turn")
                if _is_at(descriptor, path):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still names the open file: its last holder may have removed it."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))
