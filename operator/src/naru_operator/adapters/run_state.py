"""The note a running `naru up` leaves for the other commands: where it is and how to reach it.

One JSON file a process under ``$NARU_HOME/run``, readable by its owner alone (a Redis URL may hold a password), gone
when the process stops. A file whose process is dead is stale: it and the folder it names are removed by the next
command that sees it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from naru_operator.adapters.process_age import process_start
from naru_proto.errors import Unavailable

_FOLDER_PREFIX = "naru-"


@dataclass(frozen=True, slots=True)
class RunState:
    """One running instance."""

    pid: int
    process_start: int
    """Clock ticks from boot to its start: tells it from a later process with the same id."""
    http_url: str
    grpc_address: str
    redis_url: str
    folder: str
    """Its private folder: the socket and, unless they were wanted elsewhere, the logs."""
    log_dir: str
    more_http_urls: tuple[str, ...] = ()
    """Of the second router and those after it."""


def naru_home() -> Path:
    """``$NARU_HOME``, else ``~/.cache/naru`` (or below ``$XDG_CACHE_HOME``)."""
    if home := os.environ.get("NARU_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser().absolute() / "naru"


def private_folder() -> Path:
    """A fresh folder for socket and logs; its path is short, as a socket's path may have 107 bytes.

    Raises:
        Unavailable: none can be made.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    except OSError as exc:
        raise Unavailable(
            f"no folder for sockets and logs can be made below {tempfile.gettempdir()!r} ({exc.strerror}); free space "
            "there, or set TMPDIR to another folder"
        ) from exc


def write_run_state(home: Path, state: RunState) -> Path:
    """Leaves the note; returns its path.

    Raises:
        Unavailable: it cannot be written.
    """
    path = home / "run" / f"{state.pid}.json"
    staged = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            json.dump(dataclasses.asdict(state), out)
        staged.rename(path)
    except OSError as exc:
        raise Unavailable(
            f"{str(path)!r} cannot be written ({exc.strerror}); set NARU_HOME to a folder of yours"
        ) from exc
    return path


def running(home: Path) -> list[RunState]:
    """Instances that run, oldest first; what dead ones left behind is removed."""
    found = []
    for path in sorted((home / "run").glob("*.json")):
        state = _read(path)
        if state is None:
            continue
        if process_start(state.pid) == state.process_start:
            found.append(state)
            continue
        folder = Path(state.folder)
        if folder.name.startswith(_FOLDER_PREFIX) and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder, ignore_errors=True)
        path.unlink(missing_ok=True)
    return sorted(found, key=lambda state: state.process_start)


def _read(path: Path) -> RunState | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data.setdefault("more_http_urls", [])  # a note of an older version has one router
        given = {field.name: data[field.name] for field in dataclasses.fields(RunState)}
        urls = given["more_http_urls"]
        if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
            return None
        state = RunState(**{**given, "more_http_urls": tuple(urls)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    kinds = {field.name: field.type for field in dataclasses.fields(RunState)}
    types = {"int": int, "str": str}
    is_sound = all(isinstance(getattr(state, name), types.get(str(kind), tuple)) for name, kind in kinds.items())
    return state if is_sound else None
