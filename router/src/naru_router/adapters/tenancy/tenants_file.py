"""Keeps the tenants of a file up to date: looks at it each second, reads it when it has changed. Used by the tenancy.

A file that is broken or gone changes nothing but `problem`: the last good one goes on. A mounted Secret is swapped as a
whole by its symbolic link, so that no half of one is ever read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from naru_proto.errors import InvalidRequest
from naru_proto.settings import SettingsError
from naru_proto.tenants import MAX_FILE_BYTES, Tenant, read_tenants

logger = logging.getLogger(__name__)

POLL_S = 1.0

_State = tuple[int, int, int, int]


class TenantsFile:
    """A file and what was last read of it."""

    def __init__(self, path: str, *, on_look: Callable[[TenantsFile], None], poll_s: float = POLL_S) -> None:
        """Reads it. `on_look` is called after each look that found another file or no good one.

        Raises:
            SettingsError: it cannot be read: without a first good one nobody is known.
        """
        self._path = Path(path)
        self._on_look = on_look
        self._poll_s = poll_s
        self.problem = ""
        """Why what is in use is not what the file says; empty: it is."""
        try:
            self._state: _State | None = _state(self._path)
            self.tenants = read_file(self._path)
        except (InvalidRequest, OSError) as exc:
            raise SettingsError(f"tenants_file {path!r} cannot be used: {_text(exc)}") from exc

    async def run(self) -> None:
        """Follows the file until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.look()

    async def look(self) -> None:
        """Reads the file if it is another one than at the last look."""
        try:
            state = await asyncio.to_thread(_state, self._path)
            if state == self._state:
                return
            # Before it is read: what changes meanwhile is seen at the next look.
            self._state = state
            tenants = await asyncio.to_thread(read_file, self._path)
        except (InvalidRequest, OSError) as exc:
            if isinstance(exc, OSError):
                self._state = None
            self._fail(_text(exc))
            return
        if self.problem:
            logger.info("the tenants file is good again")
        self.problem = ""
        if tenants != self.tenants:
            self.tenants = tenants
            logger.info("the tenants file has %d tenants now", len(tenants))
        self._on_look(self)

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            logger.warning("the tenants file is not applied, the last good one goes on: %s", problem)
        self.problem = problem
        self._on_look(self)


def read_file(path: Path) -> tuple[Tenant, ...]:
    """The tenants of a file, YAML or JSON.

    Raises:
        InvalidRequest: it is no such file; says what is wrong, without a key.
        OSError: it cannot be read.
    """
    # Imported here: a router without tenants needs no YAML.
    from naru_proto.yaml_text import BadYaml, load_yaml

    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"it is larger than {MAX_FILE_BYTES} bytes")
    try:
        documents = load_yaml(data)
    except BadYaml as exc:
        raise InvalidRequest(f"it {exc}") from exc
    return read_tenants(documents)


def _state(path: Path) -> _State:
    """Another one for another file or content, links followed."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _text(exc: InvalidRequest | OSError) -> str:
    return exc.message if isinstance(exc, InvalidRequest) else f"it cannot be read ({exc.strerror})"
