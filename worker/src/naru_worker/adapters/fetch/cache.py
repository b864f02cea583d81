"""The model cache on disk: one folder per revision, complete or absent. Called by the schemes; knows no network.

    NAME            an entry, whole: it came by one rename, after its files were verified
    NAME.partial    it is being put together, or its fetch was interrupted
    NAME.lock       held alone by whoever fetches or evicts it, so that one of all that want it downloads
    NAME.use        shared by all that need the files; its time is the entry's last use
    NAME.broken     on its way out

How much all entries may take is `budget`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.locks import HeldLock, is_locked, try_lock, wait_lock
from naru_worker.adapters.fetch.model import FetchedModel

MANIFEST = "naru.json"
RESERVED = "naru.reserved"
"""In a partial entry: the bytes it will need, as text."""
PARTIAL_SUFFIX = ".partial"
BROKEN_SUFFIX = ".broken"
SPARE_BYTES = 64 << 20
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
        return self._beside(PARTIAL_SUFFIX)

    @property
    def is_busy(self) -> bool:
        """Whether somebody fetches it or needs its files."""
        return self.is_being_fetched or is_locked(self._beside(".use"))

    @property
    def is_being_fetched(self) -> bool:
        """Whether somebody fetches it, or waits for nothing but the end of its eviction."""
        return is_locked(self._beside(".lock"))

    def last_used_ns(self) -> int:
        """Unix time of the last use; 0: never."""
        try:
            return self._beside(".use").stat().st_mtime_ns
        except OSError:
            return 0

    @contextlib.contextmanager
    def lock(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Holds the entry for this fetch alone; ``on_wait`` is called now and then while another one has it.

        Raises:
            LoadError: the cache cannot be written.
        """
        held = self._take_lock(on_wait)
        try:
            yield
        finally:
            held.close()

    def open(self) -> FetchedModel | None:
        """The entry, kept from eviction until it is released; None unless every file is there in its full size."""
        try:
            use = try_lock(self._beside(".use"), shared=True) if self.folder.is_dir() else None
        except OSError:
            # A cache that cannot be written cannot be evicted from either.
            return self.load()
        found = self.load(use) if use is not None else None
        if use is not None:
            use.touch() if found is not None else use.close()
        return found

    def load(self, use: HeldLock | None = None) -> FetchedModel | None:
        """The entry as it lies there, or None."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            for name, size in manifest["files"].items():
                if (self.folder / name).stat().st_size != size:
                    return None
            path = self.folder / manifest["entry"] if manifest["entry"] else self.folder
            return FetchedModel(path, str(manifest["digest"]), str(manifest["revision"]), use)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # Anything unreadable is no entry: it is fetched again and replaced.
            return None

    def commit(self, *, entry: str, digest: str, revision: str) -> FetchedModel:
        """Turns the staging folder into the entry, in one rename, in place of whatever stood there, and opens it.

        Raises:
            LoadError: the disk is full or read-only.
        """
        with writing(self.folder):
            (self.staging / RESERVED).unlink(missing_ok=True)
            files = {
                str(path.relative_to(self.staging)): path.stat().st_size
                for path in sorted(self.staging.rglob("*"))
                if path.is_file() and path.name != MANIFEST
            }
            manifest = {"entry": entry, "digest": digest, "revision": revision, "files": files}
            (self.staging / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
            self._put_away(self.folder)
            self.staging.rename(self.folder)
        opened = self.open()
        if opened is None:
            raise LoadError(f"cache entry {str(self.folder)!r} changed while it was written; fetch the model again")
        return opened

    def evict(self) -> bool:
        """Removes the entry, whole or partial, unless somebody fetches or needs it; whether it did.

        Raises:
            LoadError: the cache cannot be written.
        """
        with writing(self.folder), contextlib.ExitStack() as held:
            lock = try_lock(self._beside(".lock"))
            if lock is None:
                return False
            held.callback(lock.close)
            use = try_lock(self._beside(".use"))
            if use is None:
                return False
            self._put_away(self.folder)
            self._put_away(self.staging)
            use.remove()
            lock.remove()
        return True

    def _take_lock(self, on_wait: Callable[[], None]) -> HeldLock:
        with writing(self.folder):
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Outside of `writing`: what the waiting raises is its own.
            held = try_lock(self._beside(".lock"))
        return held or wait_lock(self._beside(".lock"), on_wait)

    def _put_away(self, folder: Path) -> None:
        """Removes a folder so that a crash on the way leaves nothing that looks like an entry."""
        broken = self._beside(BROKEN_SUFFIX)
        shutil.rmtree(broken, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)

    def _beside(self, suffix: str) -> Path:
        return self.folder.with_name(self.folder.name + suffix)


def cache_entry(home: Path, scheme: str, *parts: str) -> CacheEntry:
    """The entry under ``home/models/scheme/parts...``; parts must be checked names without separators."""
    for part in parts:
        assert part not in ("", ".", "..") and "/" not in part, part
    return CacheEntry(home.joinpath("models", scheme, *parts))


def read_ref(ref: Path) -> str:
    """What a moving name (branch, tag, folder) stood for when it was last fetched; empty: it never was."""
    try:
        return ref.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def write_ref(ref: Path, target: str) -> None:
    """Notes what a moving name stands for, in one step.

    Raises:
        LoadError: the cache cannot be written.
    """
    with writing(ref):
        ref.parent.mkdir(parents=True, exist_ok=True)
        staged = ref.with_name(f"{ref.name[:64]}.{uuid.uuid4().hex}.part")
        staged.write_text(target, encoding="ascii")
        staged.rename(ref)


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
            why = f"no space is left on its disk ({megabytes(free_bytes(folder))} free)"
            remedy = "free some, or set NARU_HOME to a folder on a larger disk"
        elif exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why, remedy = "it cannot be written", "set NARU_HOME to a folder of yours"
        else:
            why, remedy = exc.strerror or str(exc), "check the disk, or set NARU_HOME to another folder"
        raise LoadError(f"model cache {str(folder.parent)!r}: {why}; {remedy}") from exc


def free_bytes(folder: Path) -> int:
    """What the disk of a folder, which need not exist yet, still takes."""
    probe = folder
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    return shutil.disk_usage(probe).free


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuses what cannot fit on the disk of ``folder``, before a byte is written.

    Raises:
        LoadError: too little space; names both sizes.
    """
    free = free_bytes(folder)
    if needed_bytes + SPARE_BYTES > free:
        raise LoadError(
            f"{what} needs {megabytes(needed_bytes)} on disk (and {megabytes(SPARE_BYTES)} spare), but "
            f"{str(folder)!r} has {megabytes(free)} free; free some, or set NARU_HOME to a folder on a larger disk"
        )


def megabytes(size_bytes: int) -> str:
    """For messages."""
    return f"{size_bytes / 1e6:,.0f} MB"
