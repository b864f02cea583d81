"""The model cache on disk: one folder per revision, complete or absent. Called by the schemes; knows no network.

An entry appears by one rename, after its files were verified. Fetches of the same entry, in this process or another,
take turns by a file lock, which the kernel frees when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.model import FetchedModel

_MANIFEST = "naru.json"
_SPARE_BYTES = 64 << 20
"""Left free by a fetch: a full disk breaks more than Naru."""


def default_home() -> Path:
    """``$NARU_HOME``, else ``~/.cache/naru`` (or below ``$XDG_CACHE_HOME``)."""
    if home := os.environ.get("NARU_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "naru"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One revision of one model; ``folder`` is its final place."""

    folder: Path

    @property
    def staging(self) -> Path:
        """Where the entry is put together; may hold files of an interrupted fetch."""
        return self.folder.with_name(self.folder.name + ".partial")

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Holds the entry for this fetch alone; ``on_wait`` is called once if another one has it.

        Raises:
            LoadError: the cache cannot be written.
        """
        with writing(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(
                self.folder.with_name(self.folder.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def load(self) -> FetchedModel | None:
        """The entry, or None unless every file of it is there in its full size."""
        try:
            manifest = json.loads((self.folder / _MANIFEST).read_bytes())
            for name, size in manifest["files"].items():
                if (self.folder / name).stat().st_size != size:
                    return None
            path = self.folder / manifest["entry"] if manifest["entry"] else self.folder
            return FetchedModel(path, str(manifest["digest"]), str(manifest["revision"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # Anything unreadable is no entry: it is fetched again and replaced.
            return None

    def commit(self, *, entry: str, digest: str, revision: str) -> FetchedModel:
        """Turns the staging folder into the entry, in one rename, in place of whatever stood there.

        Raises:
            LoadError: the disk is full or read-only.
        """
        with writing(self.folder):
            files = {
                str(path.relative_to(self.staging)): path.stat().st_size
                for path in sorted(self.staging.rglob("*"))
                if path.is_file() and path.name != _MANIFEST
            }
            manifest = {"entry": entry, "digest": digest, "revision": revision, "files": files}
            (self.staging / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
            if self.folder.exists():
                broken = self.folder.with_name(self.folder.name + ".broken")
                shutil.rmtree(broken, ignore_errors=True)
                self.folder.rename(broken)
                shutil.rmtree(broken, ignore_errors=True)
            self.staging.rename(self.folder)
        loaded = self.load()
        if loaded is None:
            raise LoadError(f"cache entry {str(self.folder)!r} changed while it was written; fetch the model again")
        return loaded


def cache_entry(home: Path, scheme: str, *parts: str) -> CacheEntry:
    """The entry under ``home/models/scheme/parts...``; parts must be checked names without separators."""
    for part in parts:
        assert part not in ("", ".", "..") and "/" not in part, part
    return CacheEntry(home.joinpath("models", scheme, *parts))


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns what a disk can refuse into sentences.

    Raises:
        LoadError: full, read-only or forbidden.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            why, remedy = "no space is left on its disk", "free some, or set NARU_HOME to a folder on a larger disk"
        elif exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why, remedy = "it cannot be written", "set NARU_HOME to a folder of yours"
        else:
            why, remedy = exc.strerror or str(exc), "check the disk, or set NARU_HOME to another folder"
        raise LoadError(f"model cache {str(folder.parent)!r}: {why}; {remedy}") from exc


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuses what cannot fit on the disk of ``folder``, before a byte is written.

    Raises:
        LoadError: too little space; names both sizes.
    """
    probe = folder
    while not probe.exists():
        probe = probe.parent
    free_bytes = shutil.disk_usage(probe).free
    if needed_bytes + _SPARE_BYTES > free_bytes:
        raise LoadError(
            f"{what} needs {_mb(needed_bytes)} on disk (and {_mb(_SPARE_BYTES)} spare), but {str(folder)!r} has "
            f"{_mb(free_bytes)} free; free some, or set NARU_HOME to a folder on a larger disk"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
