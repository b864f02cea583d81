"""What a model's files look like from outside: enough to tell, by a few stat calls, that none has changed.

Used by the store to find the image of a source without opening it. Reads no content.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import LoadStopped

MAX_FILES = 10_000
SETTLE_S = 0.02
"""Two writes within one tick of the file system's clock (at most 10 ms) leave the same times behind."""


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """A source at one moment. Equal: the same files, unchanged."""

    path: Path
    """Absolute."""
    entries: tuple[tuple[str, int, int, int, int], ...]
    """(name, bytes, mtime in ns, ctime in ns, inode), by name."""

    @property
    def key(self) -> str:
        """Stands for the path in names of files."""
        return hashlib.blake2b(os.fsencode(self.path), digest_size=20).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Stands for the entries."""
        return hashlib.blake2b(repr(self.entries).encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def source_files(source: Path) -> SourceFiles:
    """A model file, or the regular files right in a model folder, links followed.

    Raises:
        LoadError: it is not there, cannot be looked at, or holds too many files.
    """
    path = source.absolute()
    try:
        info = path.stat()
        if not stat.S_ISDIR(info.st_mode):
            return SourceFiles(path, (_entry(path.name, info),))
        entries: list[tuple[str, int, int, int, int]] = []
        with os.scandir(path) as found:
            for item in found:
                if not item.is_file():
                    continue
                entries.append(_entry(item.name, item.stat()))
                if len(entries) > MAX_FILES:
                    raise LoadError(f"{path}: has more than {MAX_FILES} files; a model folder is needed", param="path")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        raise LoadError(f"{source}: cannot be looked at ({why}); check the path and its rights", param="path") from e
    return SourceFiles(path, tuple(sorted(entries)))


def settled_source_files(source: Path, should_stop: threading.Event) -> SourceFiles:
    """The same, once the last change is so long ago that a later one would show.

    Raises:
        LoadError: see `source_files`.
        LoadStopped: it was told to stop.
    """
    while True:
        files = source_files(source)
        newest_ns = max((max(mtime, ctime) for _, _, mtime, ctime, _ in files.entries), default=0)
        # A time in the future (another machine's clock) tells nothing and is not waited for.
        age_s = (time.time_ns() - newest_ns) / 1e9
        if not 0 <= age_s < SETTLE_S:
            return files
        if should_stop.wait(SETTLE_S):
            raise LoadStopped(f"{source}: the load was told to stop")


def _entry(name: str, info: os.stat_result) -> tuple[str, int, int, int, int]:
    return (name, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
