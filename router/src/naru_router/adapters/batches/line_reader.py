"""The lines of a file, one after the other, whatever its size. Used by whoever checks or works on a batch."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from naru_router.adapters.storage.file_shelf import FileShelf


async def read_lines(shelf: FileShelf, path: Path, max_bytes: int) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Number, from 1, and bytes of each line that is not blank; None in place of one that is too long.

    Holds one line, and one piece of the file.

    Raises:
        NotFound: the file is gone.
        Unavailable: the disk cannot be read.
    """
    number, rest, is_cut = 1, b"", False
    async with contextlib.aclosing(shelf.chunks(path)) as chunks:
        async for data in chunks:
            first, *others = data.split(b"\n")
            rest += b"" if is_cut else first
            for line in others:
                if is_cut or rest.strip():
                    yield number, None if is_cut or len(rest) > max_bytes else rest
                number, rest, is_cut = number + 1, line, False
            if len(rest) > max_bytes:
                rest, is_cut = b"", True
    if is_cut or rest.strip():
        yield number, None if is_cut or len(rest) > max_bytes else rest
