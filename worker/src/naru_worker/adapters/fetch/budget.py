"""How much disk fetched models may take: room is taken before a download, and the least recently used go for it.

Called by the schemes through `FetchJob`. Several workers of a node may share the cache: what they fetch now is counted
in full, and what they use is never evicted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.cache import (
    BROKEN_SUFFIX,
    MANIFEST,
    PARTIAL_SUFFIX,
    RESERVED,
    SPARE_BYTES,
    CacheEntry,
    free_bytes,
    megabytes,
    require_space,
    writing,
)
from naru_worker.adapters.fetch.locks import try_lock, wait_lock
from naru_worker.adapters.images.eviction import StoredImage, choose_victims

PARTIAL_EXPIRY_S = 7 * 86400.0
"""An interrupted download that nobody took up for so long is thrown away."""
_LOCK = ".budget.lock"


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """One entry of the cache, whole or partial, as it lies there."""

    entry: CacheEntry
    is_partial: bool
    num_bytes: int
    reserved_bytes: int
    """Of a partial one: what it will have, as far as it was known."""
    last_used_ns: int

    def booked_bytes(self) -> int:
        """What it counts for: all that it will have while somebody fetches it."""
        grows = self.is_partial and self.reserved_bytes > self.num_bytes and self.entry.is_being_fetched
        return self.reserved_bytes if grows else self.num_bytes


class CacheBudget:
    """The budget of one cache; stateless, all is on the disk. Safe from several threads and processes."""

    def __init__(self, home: Path, limit_bytes: int) -> None:
        """`limit_bytes` -1: half of what is free or fetched already."""
        self._root = home / "models"
        self._limit_bytes = limit_bytes

    def reserve(self, entry: CacheEntry, needed_bytes: int, what: str, on_wait: Callable[[], None]) -> None:
        """Takes room for an entry that is being fetched, evicting what it must. The entry's lock is held.

        Raises:
            LoadError: it can never fit, or not beside what is in use; names the sizes.
        """
        with writing(entry.folder):
            entry.staging.mkdir(parents=True, exist_ok=True)
        with self._locked(on_wait):
            self._sweep(entry)
            for _ in range(3):
                cached = list(self.scan())
                missing = self._missing_bytes(cached, entry, needed_bytes, what)
                if missing <= 0 or not self._evict(cached, entry, missing, needed_bytes, what):
                    break
            with writing(entry.folder):
                (entry.staging / RESERVED).write_text(str(needed_bytes))

    def scan(self) -> Iterator[CachedFiles]:
        """All entries; what disappears meanwhile is left out."""
        for place, names, files in os.walk(self._root):
            here = Path(place)
            if MANIFEST in files or here.name.endswith((PARTIAL_SUFFIX, BROKEN_SUFFIX)):
                names.clear()
                yield _look_at(here)

    def used_bytes(self) -> int:
        """What fetched files take, downloads under way and interrupted ones included."""
        return sum(cached.num_bytes for cached in self.scan())

    def _missing_bytes(self, cached: list[CachedFiles], entry: CacheEntry, needed_bytes: int, what: str) -> int:
        """How much has to go, by the budget and by the disk, whichever is more."""
        others = [files for files in cached if files.entry.folder != entry.folder]
        present = sum(files.num_bytes for files in cached if files.entry.folder == entry.folder)
        free = free_bytes(self._root)
        limit = self._limit_bytes
        if limit < 0:
            limit = (free + sum(files.num_bytes for files in cached)) // 2
        if needed_bytes > limit:
            if self._limit_bytes < 0:
                require_space(entry.folder, needed_bytes, what)
            raise LoadError(
                f"{what} needs {megabytes(needed_bytes)} on disk, more than the {megabytes(limit)} that all fetched "
                "models may take; raise the worker's cache_budget_bytes, or the cache's size in the WorkerPool"
            )
        growing = sum(files.booked_bytes() - files.num_bytes for files in others)
        by_budget = sum(files.booked_bytes() for files in others) + needed_bytes - limit
        by_disk = max(0, needed_bytes - present) + SPARE_BYTES + growing - free
        return max(by_budget, by_disk)

    def _evict(
        self, cached: list[CachedFiles], entry: CacheEntry, missing_bytes: int, needed_bytes: int, what: str
    ) -> bool:
        """Removes the least recently used; whether it must be looked at again since one of them was taken up."""
        idle = {
            str(files.entry.folder) + PARTIAL_SUFFIX * files.is_partial: files
            for files in cached
            if files.entry.folder != entry.folder and not files.entry.is_busy
        }
        images = [StoredImage(name, files.num_bytes, files.last_used_ns) for name, files in idle.items()]
        victims = choose_victims(images, missing_bytes, ())
        if victims is None:
            used = sum(files.num_bytes for files in cached)
            busy = used - sum(files.num_bytes for files in idle.values())
            raise LoadError(
                f"{what} needs {megabytes(needed_bytes)} on disk: fetched models take {megabytes(used)}, "
                f"{megabytes(busy)} of them in use or being fetched, and {str(self._root)!r} has "
                f"{megabytes(free_bytes(self._root))} free; unload a model, free disk space, or raise the worker's "
                "cache_budget_bytes"
            )
        return not all([idle[victim.digest].entry.evict() for victim in victims])

    def _sweep(self, own: CacheEntry) -> None:
        """Removes what crashes left, and interrupted downloads that nobody will take up."""
        oldest_ns = time.time_ns() - int(PARTIAL_EXPIRY_S * 1e9)
        for files in list(self.scan()):
            if files.is_partial and files.entry.folder != own.folder and files.last_used_ns < oldest_ns:
                if not files.entry.load():
                    files.entry.evict()

    @contextlib.contextmanager
    def _locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        with writing(self._root / _LOCK):
            self._root.mkdir(parents=True, exist_ok=True)
            # Outside of `writing`: what the waiting raises is its own.
            held = try_lock(self._root / _LOCK)
        held = held or wait_lock(self._root / _LOCK, on_wait)
        try:
            yield
        finally:
            held.close()


def _look_at(folder: Path) -> CachedFiles:
    num_bytes, newest_ns, reserved = 0, 0, 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                info = os.stat(os.path.join(place, name))
                num_bytes += info.st_size
                newest_ns = max(newest_ns, info.st_mtime_ns)
    for suffix in (PARTIAL_SUFFIX, BROKEN_SUFFIX):
        if folder.name.endswith(suffix):
            entry = CacheEntry(folder.with_name(folder.name.removesuffix(suffix)))
            with contextlib.suppress(OSError, ValueError):
                reserved = int((folder / RESERVED).read_text())
            return CachedFiles(entry, True, num_bytes, reserved, newest_ns)
    entry = CacheEntry(folder)
    return CachedFiles(entry, False, num_bytes, 0, entry.last_used_ns() or newest_ns)
