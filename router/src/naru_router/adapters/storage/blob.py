"""One content on its way to disk: written in pieces, then committed into its place or dropped. Made by the store."""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from naru_router.adapters.storage.disk import sync_folder


class BlobWriter:
    """Mutable; one writer at a time."""

    def __init__(self, path: Path, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """Opens a piece beside `path`; blocks. `run` does work in a thread, and has our errors for a disk's."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._run = run
        self._piece = path.with_name(f".{secrets.token_hex(8)}.part")
        self._file = self._piece.open("xb")
        self.num_bytes = 0
        """Written so far."""

    async def write(self, data: bytes) -> None:
        """Adds to it.

        Raises:
            Unavailable: the disk is full or away.
        """
        await self._run(lambda: self.append(data))

    def append(self, data: bytes) -> None:
        """The same for a thread that may block.

        Raises:
            OSError: the disk is full or away.
        """
        self._file.write(data)
        self.num_bytes += len(data)

    async def commit(self) -> None:
        """Puts it into its place; on disk when this returns.

        Raises:
            Unavailable: the disk is full or away.
        """
        await self._run(self._commit)

    async def drop(self) -> None:
        """Forgets it; after a commit: nothing."""
        await self._run(self._drop)

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._piece.replace(self._path)
        sync_folder(self._path.parent)

    def _drop(self) -> None:
        self._file.close()
        self._piece.unlink(missing_ok=True)
