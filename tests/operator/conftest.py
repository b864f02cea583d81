"""Fixtures of the control plane's tests: a real Redis, a private home."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from naru_operator.adapters.route_map import RouteMap, open_route_map

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def redis_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A redis-server for the session."""
    from local_redis import local_redis

    with local_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def route_map(redis_server_url: str) -> AsyncIterator[RouteMap]:
    """An empty route map."""
    import redis

    with redis.Redis.from_url(redis_server_url) as board:
        board.flushall()
    opened = open_route_map(redis_server_url)
    yield opened
    await opened.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, with temporary folders below it."""
    monkeypatch.setenv("NARU_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path
