"""How records are read and written, file by file. All of it blocks: the record store calls it in threads of its own."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

import orjson

from naru_proto.errors import NaruError, Unavailable

logger = logging.getLogger(__name__)

FENCE = "fence"
"""Field of a record: the fencing token of its last writer."""
FOLDER = re.compile(r"t-[0-9a-f]{32}")
"""Names of tenants' folders."""


def disk_error(exc: OSError) -> NaruError:
    """A disk's refusal in our words; names no path."""
    reason = os.strerror(exc.errno) if exc.errno else type(exc).__name__
    logger.error("the folder of files refuses: %s", exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"the router's disk for files is full ({reason}); delete files, or tell whoever runs it")
    return Unavailable(f"the router's folder for files cannot be used: {reason}; tell whoever runs it")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file so that it is the old one or the new one, whatever happens. Blocks.

    Raises:
        OSError: the disk refuses; the old one stands.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    piece = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with piece.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        piece.replace(path)
    except BaseException:
        piece.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_fenced(path: Path, data: bytes, fence: int) -> bool:
    """The same unless the record there has a later fencing token; whether it was written.

    Raises:
        OSError: the disk refuses; the old one stands.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (path.parent / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a process that dies lets go of it
        before = read_record(path)
        if before is not None and before.get(FENCE, 0) > fence:
            return False
        write_whole(path, data)
    return True


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last. Blocks; file systems that cannot are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_record(path: Path) -> dict[str, Any] | None:
    """A record; None: there is none, or what is there cannot be read."""
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as exc:
        logger.error("the record %s cannot be read: %s", path.name, exc)
        return None
    return value if isinstance(value, dict) else None


def remove(path: Path) -> bool:
    """Removes a file; whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def names_in(folder: Path, suffix: str) -> list[str]:
    """Names of the files that end so, without that end; none of pieces and locks."""
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [name.removesuffix(suffix) for name in entries if name.endswith(suffix) and not name.startswith(".")]


def tenant_folders(folder: Path) -> list[str]:
    """Names of tenants' folders in it, sorted."""
    try:
        return sorted(name for name in os.listdir(folder) if FOLDER.fullmatch(name))
    except FileNotFoundError:
        return []


def sweep_pieces(folder: Path, before_s: float) -> int:
    """Removes pieces that nobody has written to since a time in Unix seconds; how many."""
    count = 0
    for path in folder.glob("*/*/*/.*.part"):
        with contextlib.suppress(FileNotFoundError):  # its writer, or another router, was faster
            if path.stat().st_mtime < before_s:
                path.unlink()
                count += 1
    return count
