"""Fixtures of the router's tests: a real Redis, and a rig with a real router over loopback and stub workers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

if TYPE_CHECKING:
    import redis.asyncio
    from redis_process import RedisProcess
    from router_rig import Rig


@pytest.fixture(scope="session", autouse=True)
def no_stray_loop() -> None:
    """Keeps the policy from making an event loop that nobody closes when pytest-asyncio asks for the current one."""
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A redis-server for the session, on a socket file."""
    from redis_process import RedisProcess

    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def rig(redis_process: RedisProcess) -> AsyncIterator[Rig]:
    """An empty board, no worker, no router yet."""
    from router_rig import Rig

    redis_process.flush()
    made = Rig(redis_process.url)
    yield made
    await made.close()


@pytest.fixture
async def second(rig: Rig) -> AsyncIterator[Rig]:
    """Another router over the same board and workers."""
    from router_rig import Rig

    made = Rig(rig.redis_url)
    made.workers = rig.workers
    yield made
    await made.close()


@pytest.fixture
async def client(redis_process: RedisProcess) -> AsyncIterator[redis.asyncio.Redis]:
    """A client as leases and quotas use it, of an empty Redis."""
    from naru_router.adapters.leases import connect

    redis_process.flush()
    made = connect(redis_process.url)
    yield made
    await made.aclose()
