"""What is done of a batch, on disk: parts that are only ever added to, one for each router that has worked on it.

A part is named by its writer's fencing token, so that one which comes late, after its lease has gone, spoils nothing.
Each entry is the line's number among those that are not blank, `o` (output) or `e` (error), and the line of the output
file. A last entry without its end was being written when its writer died: it was never done.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from naru_router.adapters.storage.record_store import RecordStore

KIND = "batch_part"
READ_BYTES = 1024 * 1024
_ENTRY = re.compile(rb"([0-9]{1,9}) ([eo]) (\{.*\})\n")


class Done:
    """Which lines are done: one byte for each line number. Mutable."""

    def __init__(self, num_lines: int) -> None:
        """`num_lines`: of the file, but for blank ones."""
        self._flags = bytearray(num_lines + 1)
        self.completed = 0
        self.failed = 0

    def add(self, number: int, *, is_error: bool) -> bool:
        """Notes a line as done; False: it was already, or is none of the file's."""
        if not 0 < number < len(self._flags) or self._flags[number]:
            return False
        self._flags[number] = 1
        if is_error:
            self.failed += 1
        else:
            self.completed += 1
        return True

    def __contains__(self, number: int) -> bool:
        return 0 < number < len(self._flags) and self._flags[number] == 1


class PartWriter:
    """Adds to one part. Its methods block."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()  # who was cancelled left a thread behind that still writes
        self._end = self._file.tell()

    def append(self, data: bytes) -> None:
        """Writes whole entries; all of them or none.

        Raises:
            OSError: the disk is full or away.
        """
        with self._lock:
            try:
                written = self._file.write(data)
                while written < len(data):
                    written += self._file.write(data[written:])
            except OSError:
                os.ftruncate(self._file.fileno(), self._end)
                raise
            self._end += len(data)

    def sync(self) -> None:
        """Has all of it on disk, whatever happens to the machine."""
        with self._lock:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends it."""
        with self._lock:
            self._file.close()


def entry(number: int, line: bytes, *, is_error: bool) -> bytes:
    """An entry of a part."""
    return b"%d %b %b\n" % (number, b"e" if is_error else b"o", line)


class Parts:
    """All parts of one batch."""

    def __init__(self, store: RecordStore, tenant: str, batch_id: str) -> None:
        self._store = store
        self._tenant = tenant
        self._batch_id = batch_id

    async def writer(self, fence: int) -> PartWriter:
        """Of this holder's part.

        Raises:
            Unavailable: the disk refuses.
        """
        path = self._store.blob_path(KIND, self._tenant, f"{self._batch_id}-{fence:020d}")
        assert path is not None  # batch ids are our own
        return await self._store.run(lambda: PartWriter(path))

    async def scan(self, take: Callable[[int, bool, bytes], None]) -> None:
        """Gives every entry of all parts to `take`, in a thread: number, whether it is an error, and the line.

        Raises:
            Unavailable: the disk refuses.
        """

        def work() -> None:
            for path in self._paths():
                for number, is_error, line in _entries(path):
                    take(number, is_error, line)

        await self._store.run(work)

    async def remove(self) -> None:
        """Deletes all of them.

        Raises:
            Unavailable: the disk refuses.
        """

        def work() -> None:
            for path in self._paths():
                path.unlink(missing_ok=True)

        await self._store.run(work)

    def _paths(self) -> list[Path]:
        path = self._store.blob_path(KIND, self._tenant, self._batch_id)
        assert path is not None  # batch ids are our own
        return sorted(path.parent.glob(f"{self._batch_id}-*")) if path.parent.is_dir() else []


def _entries(path: Path) -> Iterator[tuple[int, bool, bytes]]:
    with path.open("rb", buffering=READ_BYTES) as file:
        for data in _whole_lines(file):
            match = _ENTRY.fullmatch(data)
            if match is not None:  # else a disk has lost some of it: that line is done again
                yield int(match[1]), match[2] == b"e", match[3]


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        if line.endswith(b"\n"):
            yield line
