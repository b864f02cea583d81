"""The one log of all parts of `naru up`: each line under the name of the part that wrote it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from naru_proto.errors import Unavailable

LOG_NAME = "naru.log"
_MAX_BYTES = 64 << 20
"""Then it begins anew, with the one before kept as ``naru.log.1``."""


class LogFile:
    """An open log. What the disk refuses is dropped: logging must not end serving."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOG_NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._out: TextIO = self._path.open("a", encoding="utf-8", buffering=1)
            self._num_bytes = self._path.stat().st_size
        except OSError as exc:
            raise Unavailable(
                f"logs cannot be written to {str(folder)!r} ({exc.strerror}); choose another folder with --log-dir"
            ) from exc

    def write(self, name: str, line: str) -> None:
        """Adds a line."""
        text = f"{name} | {line}\n"
        with contextlib.suppress(OSError):
            self._num_bytes += len(text)
            if self._num_bytes > _MAX_BYTES:
                self._out.close()
                self._path.replace(self._path.with_name(LOG_NAME + ".1"))
                self._out = self._path.open("a", encoding="utf-8", buffering=1)
                self._num_bytes = len(text)
            self._out.write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._out.close()
