"""The files of an image store, and what a crash may leave among them. Used by `ImageStore`, which decides.

DIGEST.naru         an image, whole: it came by a rename
DIGEST.used         its time is the image's last use; it says when the image's sums were last compared
*.partial           an image being packed, of its full size from the start; locked by whoever packs it
sources/KEY-V.json  what a source looked like when it was packed, and the image it gave; V: the layout's version
locks/NAME.lock     see `file_locks`
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from naru_proto.errors import LoadError
from naru_worker.adapters.images.errors import ImageDamaged, StoreFull
from naru_worker.adapters.images.eviction import StoredImage
from naru_worker.adapters.images.file_locks import try_lock
from naru_worker.adapters.images.header import HASH_BYTES, PAGE_BYTES, VERSION, ImageHeader
from naru_worker.adapters.images.source_files import SourceFiles

_DIGEST = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_MAX_RECORD_BYTES = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Partial:
    """A file being packed; space for all of it is taken. The lock lasts as long as the descriptor."""

    path: Path
    descriptor: int

    def discard(self) -> None:
        """Removes what is left of it and lets go."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


class ImageFolder:
    """Names and files; no decisions. Callers hold the store's lock where two may meet."""

    def __init__(self, root: Path) -> None:
        """Makes the folders.

        Raises:
            LoadError: they cannot be made.
        """
        self.root = root
        self.locks = root / "locks"
        self._sources = root / "sources"
        with self.writing():
            for folder in (root, self.locks, self._sources):
                folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns what a disk can refuse into sentences.

        Raises:
            StoreFull: no space.
            LoadError: read-only, forbidden, broken.
        """
        try:
            yield
        except OSError as e:
            if e.errno in _FULL:
                raise StoreFull(f"image folder {str(self.root)!r}: no space is left on its disk; free some") from e
            raise LoadError(f"image folder {str(self.root)!r}: cannot be written ({e.strerror or e})") from e

    # --- images -----------------------------------------------------------------------------------------------------

    def image(self, digest: str) -> Path:
        """Where the image of that digest lies or would lie."""
        return self.root / f"{digest}.naru"

    def images(self) -> list[StoredImage]:
        """All images that are here."""
        found: list[StoredImage] = []
        for path in self.root.glob("*.naru"):
            with contextlib.suppress(FileNotFoundError):
                info = path.stat()
                try:
                    last_used_ns = path.with_suffix(".used").stat().st_mtime_ns
                except FileNotFoundError:
                    last_used_ns = info.st_mtime_ns
                found.append(StoredImage(path.stem, info.st_size, last_used_ns))
        return found

    def partial_bytes(self) -> int:
        """Space taken by images being packed."""
        total = 0
        for path in self.root.glob("*.partial"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def is_whole(self, path: Path) -> bool:
        """Whether header and size are those of an image."""
        try:
            with open(path, "rb") as file:
                page, num_bytes = file.read(PAGE_BYTES), os.fstat(file.fileno()).st_size
            ImageHeader.from_page(page, num_bytes, str(path))
        except (OSError, ImageDamaged):
            return False
        return True

    def touch(self, path: Path) -> None:
        """Notes a use. A disk that refuses costs the order of eviction, no more."""
        with contextlib.suppress(OSError):
            path.with_suffix(".used").touch()

    def remove(self, path: Path) -> None:
        """Removes an image; one that is mapped lives on until it is unmapped."""
        path.unlink(missing_ok=True)
        path.with_suffix(".used").unlink(missing_ok=True)

    # --- packing ----------------------------------------------------------------------------------------------------

    def partial_path(self) -> Path:
        """A name for the next file to be packed."""
        return self.root / f"{uuid.uuid4().hex}.partial"

    def make_partial(self, path: Path, num_bytes: int) -> Partial:
        """Makes the file in its full size, so that a full disk shows at once. The store's lock is held.

        Raises:
            StoreFull: no space; nothing is left.
            LoadError: the folder cannot be written.
        """
        with self.writing():
            partial = Partial(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        try:
            locked = try_lock(partial.descriptor)
            assert locked, "nobody else knows the name yet"
            os.posix_fallocate(partial.descriptor, 0, num_bytes)
        except OSError as e:
            partial.discard()
            if e.errno in _FULL:
                raise StoreFull(
                    f"image folder {str(self.root)!r}: the disk is full: the packed model needs {num_bytes} bytes, "
                    f"{self.disk_free_bytes()} are free; free some space"
                ) from e
            raise LoadError(f"image folder {str(self.root)!r}: cannot be written ({e.strerror})") from e
        return partial

    def publish(self, partial: Partial, path: Path) -> None:
        """Makes a whole, durable file an image, in one step.

        Raises:
            LoadError: the folder cannot be written.
        """
        with self.writing():
            os.rename(partial.path, path)
            self._sync()
        self.touch(path)

    def disk_free_bytes(self) -> int:
        """What the disk still takes."""
        info = os.statvfs(self.root)
        return info.f_bavail * info.f_frsize

    # --- sources ----------------------------------------------------------------------------------------------------

    def record(self, files: SourceFiles, path: Path) -> None:
        """Notes which image a source gave. A disk that refuses costs the next load some time, no more."""
        value = {"fingerprint": files.fingerprint, "digest": path.stem, "source": str(files.path)}
        record = self._record_path(files)
        temporary = record.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            temporary.write_text(json.dumps(value))
            os.replace(temporary, record)
        except OSError:
            temporary.unlink(missing_ok=True)

    def recorded(self, files: SourceFiles) -> Path | None:
        """The image that the source gave when it looked like this, if it is here."""
        value = self._read_record(self._record_path(files))
        if value.get("fingerprint") != files.fingerprint:
            return None
        path = self.image(str(value["digest"]))
        return path if path.is_file() else None

    def _record_path(self, files: SourceFiles) -> Path:
        """Of this layout: workers that read another one may share the folder, and have records of their own."""
        return self._sources / f"{files.key}-{VERSION}.json"

    def _read_record(self, record: Path) -> dict[str, object]:
        """Empty when it is not there or not ours."""
        try:
            with open(record, "rb") as file:
                value = json.loads(file.read(_MAX_RECORD_BYTES))
        except (OSError, ValueError):
            return {}
        is_ours = isinstance(value, dict) and _DIGEST.fullmatch(str(value.get("digest")))
        return value if is_ours else {}

    # --- after a crash ----------------------------------------------------------------------------------------------

    def clean_partials(self) -> None:
        """Removes files whose packer is dead. The store's lock is held: a new one has its lock before that ends."""
        for path in self.root.glob("*.partial"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(descriptor):
                        path.unlink()
                finally:
                    os.close(descriptor)

    def clean_rest(self) -> None:
        """Removes stamps and records of images that are gone, and records half written. The store's lock is held."""
        for stamp in self.root.glob("*.used"):
            if not stamp.with_suffix(".naru").exists():
                stamp.unlink(missing_ok=True)
        for record in self._sources.iterdir():
            digest = self._read_record(record).get("digest") if record.suffix == ".json" else None
            if digest is None or not self.image(str(digest)).exists():
                record.unlink(missing_ok=True)

    def _sync(self) -> None:
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
