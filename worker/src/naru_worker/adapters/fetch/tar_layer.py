"""Files of a model out of a tar layer, which may be hostile. Called by the oci scheme.

Only regular files with a model's suffixes are written; links, devices, paths that lead out, and archives that unpack to
far more than they are, are refused. Nothing is taken over of owners, modes and times.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch.artifact import LayerForm, checked_path
from naru_worker.adapters.fetch.cache import writing
from naru_worker.adapters.fetch.choosing import is_model_file

_CHUNK_BYTES = 1 << 20
_MAX_RATIO = 100
"""Weights hardly compress; far beyond it, it is a bomb."""
_MIN_LIMIT_BYTES = 64 << 20
_MAX_READ_BYTES = 16 << 20
"""A header that claims to be larger would be read into memory whole."""
_MAX_MEMBERS = 100_000
_WHITEOUT = ".wh."


class _TooMuch(Exception):
    """The archive asks for more than a model's could."""


class _Bounded:
    """A stream that only goes on, and ends an archive that unpacks to more than its limit."""

    def __init__(self, stream: IO[bytes], limit_bytes: int) -> None:
        self._stream = stream
        self._left = limit_bytes
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        if not 0 <= size <= _MAX_READ_BYTES:
            raise _TooMuch(f"{size} bytes at once")
        block = self._stream.read(min(size, self._left + 1))
        self._at += len(block)
        self._left -= len(block)
        if self._left < 0:
            raise _TooMuch("it unpacks to far more than it is")
        return block

    def tell(self) -> int:
        """Bytes read."""
        return self._at

    def seek(self, to: int) -> int:
        """Forward, by reading."""
        if to < self._at:
            raise _TooMuch("a member of negative size")
        while self._at < to and self.read(min(to - self._at, _CHUNK_BYTES)):
            pass
        return self._at


def unpack_layer(
    blob: Path, form: LayerForm, folder: str, target: Path, label: str, on_bytes: Callable[[int], None]
) -> None:
    """Writes the model files below ``folder`` of the archive (empty: all) below ``target``, over what lies there.

    Raises:
        LoadError: hostile or damaged, or the disk refuses.
    """
    limit_bytes = max(blob.stat().st_size * (_MAX_RATIO if form == "tar+gzip" else 1), _MIN_LIMIT_BYTES)
    num_members, done = 0, 0
    with _refusing(label), _opened(blob, form) as stream:
        bounded = _Bounded(stream, limit_bytes)
        with tarfile.open(fileobj=bounded, mode="r:", errorlevel=2) as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members.clear()  # else it keeps them all
                num_members += 1
                if num_members > _MAX_MEMBERS:
                    raise _TooMuch(f"over {_MAX_MEMBERS} members")
                name = _wanted_name(member, folder, target, label)
                if name:
                    done = _write(archive, member, target / name, done, on_bytes)


def _wanted_name(member: tarfile.TarInfo, folder: str, target: Path, label: str) -> str:
    """Where a member goes below the target; empty: nowhere."""
    path = member.name.removeprefix("./")
    if member.isdir() or not path or not path.startswith(folder):
        return ""
    inner = checked_path(path[len(folder) :], label)
    base = inner.rpartition("/")[2]
    if base.startswith(_WHITEOUT):
        # A later layer of an image takes away what an earlier one brought.
        with writing(target):
            (target / inner).with_name(base.removeprefix(_WHITEOUT)).unlink(missing_ok=True)
        return ""
    if not is_model_file(inner):
        return ""
    if not member.isreg() or member.issparse():
        raise LoadError(f"{label}: member {member.name[:200]!r} is a link or no plain file; push the files themselves")
    return inner


def _write(
    archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, done: int, on_bytes: Callable[[int], None]
) -> int:
    source = archive.extractfile(member)
    assert source is not None, "a regular member has content"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            while block := source.read(_CHUNK_BYTES):
                out.write(block)
                done += len(block)
                on_bytes(done)
    if path.stat().st_size != member.size:
        raise EOFError(f"{member.name[:200]!r} is cut")
    return done


@contextmanager
def _opened(blob: Path, form: LayerForm) -> Iterator[IO[bytes]]:
    with blob.open("rb") as raw:
        if form == "tar+gzip":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream  # type: ignore[misc]
        else:
            yield raw


@contextmanager
def _refusing(label: str) -> Iterator[None]:
    try:
        yield
    except _TooMuch as exc:
        raise LoadError(f"{label}: an archive layer is no model's ({exc}); do not use it") from exc
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError, OverflowError, RecursionError) as exc:
        raise LoadError(f"{label}: an archive layer is damaged ({exc}); push it again") from exc
