"""A file mapped read-only into memory.

Used by the readers of weight files; gives zero-copy views. Does not guard against a file cut short while mapped: model
files are replaced by renaming, never rewritten in place.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from naru_proto.errors import LoadError


class MappedFile:
    """Maps a regular file. `view` is read-only and valid until `close`."""

    def __init__(self, path: Path) -> None:
        """Opens and maps the file.

        Raises:
            LoadError: it cannot be opened, is no regular file, or is empty.
        """
        self.path = path
        try:
            # Without O_NONBLOCK a pipe under this name would block the worker for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise LoadError(f"{path}: cannot be opened ({e.strerror}); check the path and its rights") from e
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise LoadError(f"{path}: is not a regular file; a model file is needed")
            if info.st_size == 0:
                raise LoadError(f"{path}: is empty; fetch the model again")
            self._map = mmap.mmap(descriptor, info.st_size, access=mmap.ACCESS_READ)
        except OSError as e:
            raise LoadError(f"{path}: cannot be mapped ({e.strerror})") from e
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return len(self._map)

    def close(self) -> None:
        """Unmaps the file, or leaves that to the last view of it still alive."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # Some tensor still looks into the map; it goes away with that tensor.
            return
