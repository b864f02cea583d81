"""A real Redis server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis_server import RedisServer


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running, empty Redis."""
    # A socket's path must be short.
    server = RedisServer(tmp_path_factory.mktemp("r"))
    server.start()
    yield server
    server.stop()
    server.client.close()


@pytest.fixture
def make_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], RedisServer]]:
    """Makes servers that are not started."""
    made: list[RedisServer] = []

    def make() -> RedisServer:
        made.append(RedisServer(tmp_path_factory.mktemp("r")))
        return made[-1]

    yield make
    for server in made:
        server.stop()
        server.client.close()
