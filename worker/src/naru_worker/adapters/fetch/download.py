"""One file over HTTP, resumed after any break and verified before it counts. Called by the schemes.

Bytes go to ``<target>.part``; only a complete, verified file gets the target's name. Knows no index and no hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import transport
from naru_worker.adapters.fetch.cache import writing
from naru_worker.adapters.fetch.transport import Broken, LoggedIn, Login, check_status

if TYPE_CHECKING:
    import httpx

_CHUNK_BYTES = 1 << 20
_MAX_STALLS = 4
"""Tries in a row that brought no byte; each is preceded by a longer pause."""
_SLOW_WINDOW_S = 60.0
_SLOW_BYTES = 64 << 10
"""Less than this in a window is no transfer: a server that sends a byte now and then is taken for hung."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Hasher(Protocol):
    """The part of a hashlib object that is used here."""

    def update(self, data: bytes, /) -> None:
        """Takes more bytes."""

    def hexdigest(self) -> str:
        """The digest so far."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What a file must hash to."""

    algorithm: str
    """``sha256``, or ``git-sha1``: a git blob's id."""
    hexdigest: str

    def hasher(self, size_bytes: int) -> Hasher:
        """A fresh hasher for a file of this size."""
        if self.algorithm == "git-sha1":
            digest = hashlib.sha1(usedforsecurity=False)
            digest.update(b"blob %d\0" % size_bytes)
            return digest
        return hashlib.sha256()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to download. ``label`` names it in messages, in place of a URL that may hold a password."""

    url: str
    label: str
    size_bytes: int | None
    checksum: Checksum | None


class _WrongBytes(Exception):
    """What is in the part file is not the file."""


class _RunningHash:
    """The checksum of a part file, taken while its bytes arrive; a part of an earlier try is read once."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._hasher: Hasher | None = None
        self._done = 0

    def start(self, part: Path, start: int) -> None:
        """The next bytes come behind ``start``."""
        # A git blob's id begins with the size, so without one it is taken at the end.
        if self._file.checksum is None or self._file.size_bytes is None:
            return
        if self._hasher is None or self._done != start:
            self._hasher, self._done = self._file.checksum.hasher(self._file.size_bytes), start
            if start:
                _hash_file(self._hasher, part, start)

    def update(self, data: bytes) -> None:
        """Takes the next bytes."""
        if self._hasher is not None:
            self._hasher.update(data)
            self._done += len(data)

    def hexdigest(self, part: Path, size: int) -> str:
        """Of the whole part file."""
        assert self._file.checksum is not None
        if self._hasher is None or self._done != size:
            self._hasher, self._done = self._file.checksum.hasher(size), size
            _hash_file(self._hasher, part, size)
        return self._hasher.hexdigest()


def _hash_file(hasher: Hasher, path: Path, size: int) -> None:
    left = size
    with path.open("rb") as stream:
        while left and (block := stream.read(min(left, _CHUNK_BYTES))):
            hasher.update(block)
            left -= len(block)


def download(
    client: httpx.Client,
    file: RemoteFile,
    target: Path,
    on_bytes: Callable[[int, int], None],
    *,
    headers: dict[str, str] | None = None,
    login: Login | None = None,
) -> None:
    """Brings ``file`` to ``target``; goes on from an earlier try's part file where there is one.

    ``on_bytes(done, total)`` is called as bytes arrive; a total of 0 is unknown.

    Raises:
        LoadError: not there, forbidden, server or disk at fault, or the checksum differs. A part file that may be
            continued stays; one that is wrong is removed.
    """
    part = target.with_name(target.name + ".part")
    running = _RunningHash(file)
    stalls, started_over = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(client, file, part, on_bytes, headers or {}, login, running)
            _verify(file, part, running)
            break
        except Broken as exc:
            after = part.stat().st_size if part.exists() else 0
            stalls = 0 if after > before else stalls + 1
            if stalls > _MAX_STALLS:
                raise LoadError(
                    f"{file.label}: {exc}; check the network and run it again, it goes on from there"
                ) from exc
            if not isinstance(exc, LoggedIn):
                transport.pause(0.25 * 2**stalls)
        except _WrongBytes as exc:
            part.unlink(missing_ok=True)
            # It may be the rest of another content, or a fault on the way: one fresh try, then it is the source.
            if started_over:
                raise LoadError(f"{file.label}: {exc}; it was thrown away, try again or another source") from exc
            running, started_over = _RunningHash(file), True
    with writing(target):
        part.rename(target)


def _transfer(
    client: httpx.Client,
    file: RemoteFile,
    part: Path,
    on_bytes: Callable[[int, int], None],
    headers: dict[str, str],
    login: Login | None,
    running: _RunningHash,
) -> None:
    import httpx

    have = part.stat().st_size if part.exists() else 0
    if file.size_bytes is not None and have >= file.size_bytes:
        return
    # identity: a Range of a compressed body would not be a range of the file.
    headers = {**headers, **(login.headers() if login else {}), "Accept-Encoding": "identity"}
    if have:
        # With its end where that is known: not every server takes a range without one.
        headers["Range"] = f"bytes={have}-{'' if file.size_bytes is None else file.size_bytes - 1}"
    try:
        with client.stream("GET", file.url, headers=headers) as response:
            if response.status_code == 416:
                raise _WrongBytes(f"the server has no bytes from {have} on")
            if response.status_code == 401 and login is not None and login.answer(response):
                raise LoggedIn("the server asks for a fresh login")
            check_status(response, file.label)
            start, total = _span(response, have, file)
            with writing(part), part.open("r+b" if start else "wb") as out:
                out.seek(start)
                out.truncate()
                running.start(part, start)
                _copy(response.iter_raw(), out.fileno(), start, total, file, on_bytes, running)
                os.fsync(out.fileno())
    except (httpx.TooManyRedirects, httpx.UnsupportedProtocol, httpx.InvalidURL) as exc:
        raise LoadError(f"{file.label}: its address cannot be followed ({exc}); check the index or endpoint") from exc
    except httpx.TransportError as exc:
        raise Broken(f"the connection failed ({type(exc).__name__}: {exc})") from exc
    done = part.stat().st_size
    if total and done < total:
        raise Broken(f"only {done} of {total} bytes arrived")


def _span(response: httpx.Response, have: int, file: RemoteFile) -> tuple[int, int]:
    """Where this body starts and how long the whole file is (0: unknown)."""
    size = file.size_bytes or 0
    if response.status_code != 206:
        return 0, size or int(response.headers.get("Content-Length", "0") or "0")
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != have:
        raise _WrongBytes(f"the server answered the range {response.headers.get('Content-Range')!r}, not from {have}")
    whole = 0 if match[2] == "*" else int(match[2])
    if size and whole and whole != size:
        raise _WrongBytes(f"the server's file has {whole} bytes, {size} were announced")
    return have, size or whole


def _copy(
    chunks: Iterator[bytes],
    fd: int,
    start: int,
    total: int,
    file: RemoteFile,
    on_bytes: Callable[[int, int], None],
    running: _RunningHash,
) -> None:
    done = start
    window_done, window_end_s = done, time.monotonic() + _SLOW_WINDOW_S
    on_bytes(done, total)
    for chunk in chunks:
        done += len(chunk)
        if file.size_bytes is not None and done > file.size_bytes:
            raise _WrongBytes(f"more than the announced {file.size_bytes} bytes arrived")
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
        running.update(chunk)
        on_bytes(done, total)
        if time.monotonic() >= window_end_s:
            if done - window_done < _SLOW_BYTES:
                raise Broken(f"the server sent {done - window_done} bytes in {_SLOW_WINDOW_S:.0f} s")
            window_done, window_end_s = done, time.monotonic() + _SLOW_WINDOW_S


def _verify(file: RemoteFile, part: Path, running: _RunningHash) -> None:
    size = part.stat().st_size
    if file.size_bytes is not None and size != file.size_bytes:
        raise _WrongBytes(f"it has {size} bytes, {file.size_bytes} were announced")
    if file.checksum is None:
        return
    found = running.hexdigest(part, size)
    if found != file.checksum.hexdigest:
        raise _WrongBytes(f"its {file.checksum.algorithm} is {found}, {file.checksum.hexdigest} was announced")
