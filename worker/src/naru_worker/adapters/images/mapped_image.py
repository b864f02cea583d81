"""An image's mapping, one for each file in a process however often the image is open.

Used by `ModelImage`. Checks header, sums' hash and index when the file is first mapped; the weights themselves are
checked as they are made present.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import stat
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from naru_worker.adapters.images.errors import ImageDamaged
from naru_worker.adapters.images.header import PAGE_BYTES, ImageHeader, digest_of
from naru_worker.adapters.images.image_index import ImageIndex
from naru_worker.adapters.ops.native_lib import load_best

MAX_VERIFIED = 100_000
MAX_STAMP_CHARS = 1024
MAX_KNOWN = 64
"""About 100 KB each for a model of thirty layers."""

_Facts = tuple[ImageHeader, npt.NDArray[np.uint64], ImageIndex]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells a file's content apart from any other's, as far as the kernel's clock goes."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> FileIdentity:
        """From a stat."""
        return cls(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class MappedImage:
    """A mapped and checked file. Read-only; `acquire_image` and `release_image` count its users."""

    def __init__(self, path: Path, descriptor: int, identity: FileIdentity) -> None:
        """Maps the file and checks what is read at once.

        Raises:
            ImageDamaged: it is no whole image of this version.
        """
        self.path = path
        self.identity = identity
        self.num_users = 0
        if identity.num_bytes < PAGE_BYTES:
            raise ImageDamaged(f"{path}: has {identity.num_bytes} bytes, too few for a packed image; remove it")
        self._map = mmap.mmap(descriptor, identity.num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # The file then comes in from disk in huge pages, where its file system has them. For the whole mapping at
            # once: said of pieces it cuts the mapping at their borders, and no huge page lies across one.
            self._map.madvise(mmap.MADV_HUGEPAGE)
        try:
            self.header, self.sums, self.index = _known.get(identity) or self._read(str(path))
        except BaseException:
            self._map.close()
            raise
        _remember_facts(identity, (self.header, self.sums, self.index))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def _read(self, where: str) -> _Facts:
        header = ImageHeader.from_page(self._map[:PAGE_BYTES], len(self._map), where)
        raw_sums = self._map[header.sums_offset : header.index_offset]
        raw_index = self._map[header.index_offset :]
        if digest_of(raw_sums) != header.sums_hash or digest_of(raw_index) != header.index_hash:
            raise ImageDamaged(f"{where}: the index or the sums are damaged; remove it")
        index = ImageIndex.from_json(raw_index, where, header.weights_end, load_best().naru_segment_bytes)
        return header, np.frombuffer(raw_sums, np.uint64), index

    def tokenizer_section(self) -> bytes:
        """A copy of the tokenizer's bytes.

        Raises:
            ImageDamaged: they are not those that were packed.
        """
        raw = self._map[self.header.weights_end : self.header.sums_offset]
        if digest_of(raw).hex() != self.index.tokenizer_key:
            raise ImageDamaged(f"{self.path}: the tokenizer is damaged; remove the image")
        return raw

    def unmap(self) -> None:
        """Unmaps the file, or leaves that to the last vector of it still alive."""
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            # Somebody still looks at a vector; the mapping goes with it.
            return


def _remember_facts(identity: FileIdentity, facts: _Facts) -> None:
    """Under the lock: mappings are made under it."""
    _known.pop(identity, None)
    _known[identity] = facts
    while len(_known) > MAX_KNOWN:
        del _known[next(iter(_known))]


_lock = threading.Lock()
_known: dict[FileIdentity, _Facts] = {}
"""What was read of files and checked, least recently mapped first: reading it again takes longer than mapping them."""
_mapped: dict[FileIdentity, MappedImage] = {}
_verified: dict[FileIdentity, None] = {}


def acquire_image(path: Path) -> MappedImage:
    """The file's mapping, with one user more.

    Raises:
        ImageDamaged: the file is not there, or no whole image of this version.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise ImageDamaged(f"{path}: cannot be opened ({e.strerror}); pack the model again") from e
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ImageDamaged(f"{path}: is not a regular file; remove it")
        identity = FileIdentity.of(info)
        with _lock:
            image = _mapped.get(identity)
            if image is None:
                image = _mapped[identity] = MappedImage(path, descriptor, identity)
            image.num_users += 1
            return image
    except OSError as e:
        raise ImageDamaged(f"{path}: cannot be mapped ({e.strerror})") from e
    finally:
        os.close(descriptor)


def retain_image(image: MappedImage) -> None:
    """One user more of an image that has users."""
    with _lock:
        assert image.num_users > 0, "a mapping without users is gone"
        image.num_users += 1


def release_image(image: MappedImage) -> None:
    """One user less; the last one's going unmaps the file."""
    with _lock:
        image.num_users -= 1
        assert image.num_users >= 0, "an image is released once by each user"
        if image.num_users == 0:
            del _mapped[image.identity]
            image.unmap()


def is_verified(image: MappedImage) -> bool:
    """Whether all sums of this very file were compared since this machine was started, by whatever process."""
    if image.identity in _verified:
        return True
    stamp = _stamp_of(image.identity)
    return bool(stamp) and _stamp_at(image.path) == stamp


def remember_verified(path: Path, identity: FileIdentity) -> None:
    """All sums were right: noted here, and beside the file for processes to come."""
    with _lock:
        while len(_verified) >= MAX_VERIFIED:
            del _verified[next(iter(_verified))]
        _verified[identity] = None
    with contextlib.suppress(OSError):
        path.with_suffix(".used").write_text(_stamp_of(identity))


def _stamp_of(identity: FileIdentity) -> str:
    """Says which file, and in which life of the machine: what the disk does while it is off was seen by nobody."""
    boot = _boot_id()
    return f"verified {boot} {' '.join(map(str, dataclasses.astuple(identity)))}\n" if boot else ""


def _stamp_at(path: Path) -> str:
    try:
        return path.with_suffix(".used").read_text()[:MAX_STAMP_CHARS]
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
