"""A real redis-server, started as `naru up` starts it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from naru_operator.adapters.redis_server import READY_TEXT, find_redis_server, redis_process, redis_url


@contextlib.contextmanager
def local_redis(folder: Path) -> Iterator[str]:
    """The URL of a server that runs while the context lasts."""
    argv = redis_process(find_redis_server(), folder).argv
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if READY_TEXT in line:
                break
        else:
            raise AssertionError("redis-server ended before it was ready")
        yield redis_url(folder)
        server.terminate()
        server.stdout.read()
