"""Many distinct models from one GGUF file: byte copies with some quants changed in every tensor, and room on disk.

Called by `hub`. Copies keep scales, tokenizer and metadata, so each one loads and answers; what changes is where small
weights lie, by a generator seeded with the copy's number. Starts nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import gguf

GB = 10**9
CHANGED_BLOCKS = 64
"""Blocks of each tensor that a copy has of its own, in one run."""
LOW_BITS = {"Q4_0": 0x33, "Q4_1": 0x33, "Q8_0": 0x1F}
"""Bits of a byte of quants that may change, by format: the low half of each quant, so that weights stay weights."""
SCALE_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}
"""At the beginning of a block, before its quants; never changed."""
_STALE_PREFIX = "run-"
_LOCK_NAME = "lock"


class CopyError(Exception):
    """Copies cannot be made here."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """Where one quantized tensor lies in the file."""

    name: str
    format: str
    offset: int
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes that replace those at an offset."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class ModelCopy:
    """One model of the run."""

    name: str
    path: Path


def quant_tensors(source: Path) -> tuple[QuantTensor, ...]:
    """All tensors of a GGUF file whose quants may be changed.

    Raises:
        CopyError: there is none.
    """
    found = []
    for tensor in gguf.GGUFReader(source).tensors:
        kind = tensor.tensor_type.name
        if kind in LOW_BITS:
            block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
            num_blocks = int(tensor.n_bytes) // block_bytes
            found.append(QuantTensor(tensor.name, kind, int(tensor.data_offset), num_blocks, block_bytes))
    if not found:
        raise CopyError(f"{source} has no tensor in {', '.join(LOW_BITS)}; give a GGUF file of these with --model")
    return tuple(found)


def patches(tensors: Sequence[QuantTensor], index: int, read: Callable[[int, int], bytes]) -> Iterator[Patch]:
    """What copy number `index` has of its own: one run of blocks in each tensor. `read` takes offset and length."""
    rng = random.Random(f"model copy {index}")
    for tensor in tensors:
        count = min(CHANGED_BLOCKS, tensor.num_blocks)
        offset = tensor.offset + rng.randrange(tensor.num_blocks - count + 1) * tensor.block_bytes
        yield Patch(offset, _with_noise(read(offset, count * tensor.block_bytes), tensor, rng))


def make_copies(source: Path, folder: Path, num_models: int, progress: Callable[[int], None]) -> tuple[ModelCopy, ...]:
    """Writes the copies `m000.gguf` and on; `progress` is told after each one how many there are.

    Raises:
        CopyError: the file's formats are not known, or the disk is full.
    """
    tensors = quant_tensors(source)
    copies = []
    with source.open("rb") as reader:
        for index in range(num_models):
            copy = ModelCopy(f"m{index:03d}", folder / f"m{index:03d}.gguf")
            try:
                _write_copy(reader.fileno(), copy.path, tensors, index)
            except OSError as exc:
                raise CopyError(f"copy {index + 1} of {num_models} was not written: {exc}") from exc
            copies.append(copy)
            progress(index + 1)
    return tuple(copies)


def settle(copies: Sequence[ModelCopy]) -> None:
    """Waits until copies are on disk and lets go of their pages: no writing or reclaiming disturbs a measurement."""
    for copy in copies:
        with copy.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def image_budget(free_bytes: int, source_bytes: int, wanted_bytes: int, reserve_bytes: int) -> int:
    """Bytes for packed images: the wanted ones, or what copies and reserve leave of a disk.

    Raises:
        CopyError: less than a tenth of the copies' bytes would be left; the run would only pack.
    """
    left = free_bytes - source_bytes - reserve_bytes
    if left < min(wanted_bytes, source_bytes // 10):
        raise CopyError(
            f"{free_bytes / GB:.1f} GB are free; {source_bytes / GB:.1f} GB of copies and a reserve of "
            f"{reserve_bytes / GB:.1f} GB leave too little for images: lower --models or --reserve-gb, "
            "or give another disk with --work-dir"
        )
    return min(wanted_bytes, left)


class WorkFolder:
    """A folder for one run: gone after the `with` block, and folders of killed runs are removed at the next start."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._lock: int | None = None
        self.path = parent

    def __enter__(self) -> WorkFolder:
        """Makes it. Raises OSError where it cannot be made."""
        self._parent.mkdir(parents=True, exist_ok=True)
        for left in sorted(self._parent.glob(f"{_STALE_PREFIX}*")):
            _remove_if_abandoned(left)
        self.path = Path(tempfile.mkdtemp(prefix=_STALE_PREFIX, dir=self._parent))
        self._lock = os.open(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def read_through(folder: Path) -> int:
    """Reads every file below, so that it is in the page cache; returns the bytes."""
    buffer = bytearray(2**20)
    total = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while size := file.readinto(buffer):
                    total += size
    return total


def _with_noise(data: bytes, tensor: QuantTensor, rng: random.Random) -> bytes:
    """Whole blocks with the low bits of their quants changed. As one number: a loop over bytes would take minutes."""
    scales = SCALE_BYTES[tensor.format]
    block = bytes(scales) + bytes([LOW_BITS[tensor.format]]) * (tensor.block_bytes - scales)
    mask = int.from_bytes(block * (len(data) // tensor.block_bytes), "little")
    changed = int.from_bytes(data, "little") ^ (rng.getrandbits(8 * len(data)) & mask)
    return changed.to_bytes(len(data), "little")


def _write_copy(source: int, target: Path, tensors: Sequence[QuantTensor], index: int) -> None:
    left = os.fstat(source).st_size
    writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        offset = 0
        while left > 0:
            copied = _copy_some(source, writer, offset, left)
            if copied == 0:
                raise OSError("the source became shorter")
            offset, left = offset + copied, left - copied
        for patch in patches(tensors, index, lambda at, size: os.pread(source, size, at)):
            os.pwrite(writer, patch.data, patch.offset)
    finally:
        os.close(writer)


def _copy_some(source: int, target: int, offset: int, length: int) -> int:
    """Inside the kernel; file systems that can share blocks between copies do so. Between two of them it is a send."""
    try:
        return os.copy_file_range(source, target, length, offset, offset)
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    os.lseek(target, offset, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


def _remove_if_abandoned(folder: Path) -> None:
    """The lock of a run that lives is held; one that was killed has let go."""
    try:
        lock = os.open(folder / _LOCK_NAME, os.O_RDWR)
    except OSError:
        return  # just being made, or not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
