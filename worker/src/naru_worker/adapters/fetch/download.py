"""One file over HTTP, resumed after any break and verified before it counts. Called by the schemes.

Bytes go to ``<target>.part``; only a complete, verified file gets the target's name. Knows no index and no hub.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from naru_proto.errors import LoadError
from naru_worker.adapters.fetch import transport
from naru_worker.adapters.fetch.cache import writing
from naru_worker.adapters.fetch.transport import Broken, check_status

if TYPE_CHECKING:
    import httpx

_CHUNK_BYTES = 1 << 20
_MAX_STALLS = 4
"""Tries in a row that brought no byte; each is preceded by a longer pause."""
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


def download(
    client: httpx.Client,
    file: RemoteFile,
    target: Path,
    on_bytes: Callable[[int, int], None],
    *,
    headers: dict[str, str] | None = None,
) -> None:
    """Brings ``file`` to ``target``; goes on from an earlier try's part file where there is one.

    ``on_bytes(done, total)`` is called as bytes arrive; a total of 0 is unknown.

    Raises:
        LoadError: not there, forbidden, server or disk at fault, or the checksum differs. A part file that may be
            continued stays; one that is wrong is removed.
    """
    part = target.with_name(target.name + ".part")
    stalls, started_over = 0, False
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _transfer(client, file, part, on_bytes, headers or {})
            _verify(file, part)
            break
        except Broken as exc:
            after = part.stat().st_size if part.exists() else 0
            stalls = 0 if after > before else stalls + 1
            if stalls > _MAX_STALLS:
                raise LoadError(
                    f"{file.label}: {exc}; check the network and run it again, it goes on from there"
                ) from exc
            transport.pause(0.25 * 2**stalls)
        except _WrongBytes as exc:
            part.unlink(missing_ok=True)
            # A part file of another content (a changed upload) shows only now: one fresh try, then it is the server.
            if before == 0 or started_over:
                raise LoadError(f"{file.label}: {exc}; it was thrown away, try again or another source") from exc
            started_over = True
    with writing(target):
        part.rename(target)


def _transfer(
    client: httpx.Client, file: RemoteFile, part: Path, on_bytes: Callable[[int, int], None], headers: dict[str, str]
) -> None:
    import httpx

    have = part.stat().st_size if part.exists() else 0
    if file.size_bytes is not None and have >= file.size_bytes:
        return
    # identity: a Range of a compressed body would not be a range of the file.
    headers = {**headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with client.stream("GET", file.url, headers=headers) as response:
            if response.status_code == 416:
                raise _WrongBytes(f"the server has no bytes from {have} on")
            check_status(response, file.label)
            start, total = _span(response, have, file)
            with writing(part), part.open("r+b" if start else "wb") as out:
                out.seek(start)
                out.truncate()
                _copy(response.iter_raw(), out.fileno(), start, total, file, on_bytes)
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
    chunks: Iterator[bytes], fd: int, start: int, total: int, file: RemoteFile, on_bytes: Callable[[int, int], None]
) -> None:
    done = start
    on_bytes(done, total)
    for chunk in chunks:
        done += len(chunk)
        if file.size_bytes is not None and done > file.size_bytes:
            raise _WrongBytes(f"more than the announced {file.size_bytes} bytes arrived")
        view = memoryview(chunk)
        while view:
            view = view[os.write(fd, view) :]
        on_bytes(done, total)


def _verify(file: RemoteFile, part: Path) -> None:
    size = part.stat().st_size
    if file.size_bytes is not None and size != file.size_bytes:
        raise _WrongBytes(f"it has {size} bytes, {file.size_bytes} were announced")
    if file.checksum is None:
        return
    hasher = file.checksum.hasher(size)
    with part.open("rb") as stream:
        while block := stream.read(_CHUNK_BYTES):
            hasher.update(block)
    if hasher.hexdigest() != file.checksum.hexdigest:
        raise _WrongBytes(
            f"its {file.checksum.algorithm} is {hasher.hexdigest()}, {file.checksum.hexdigest} was announced"
        )
