"""The route map on a real Redis."""

from __future__ import annotations

import asyncio

import pytest
import redis

from naru_operator.adapters.route_map import RouteMap, open_route_map
from naru_proto import names
from naru_proto.errors import Unavailable
from naru_proto.registry import ModelRecord, ResidentRecord, WorkerRecord

A, B = ModelRecord("a", "pypi://a", 1, aliases=("x",)), ModelRecord("b", "pypi://b", 2)


async def test_records_are_written_read_and_removed(route_map: RouteMap) -> None:
    await route_map.write_models([A, B], [])
    assert (await route_map.read()).models == {"a": A, "b": B}
    await route_map.write_models([ModelRecord("a", "pypi://z", 3)], ["b"])
    assert (await route_map.read()).models == {"a": ModelRecord("a", "pypi://z", 3)}


async def test_living_leases_are_read_and_dead_ones_are_not(route_map: RouteMap, redis_server_url: str) -> None:
    worker = WorkerRecord("w-1", "127.0.0.1:1", "e", {"a": ResidentRecord("ready", 1)})
    with redis.Redis.from_url(redis_server_url) as board:
        board.sadd(names.KEY_WORKERS, "w-1", "gone")
        board.set(names.key_worker("w-1"), worker.to_json())
    assert (await route_map.read()).workers == {"w-1": worker}


async def test_entries_that_are_none_are_left_out(route_map: RouteMap, redis_server_url: str) -> None:
    with redis.Redis.from_url(redis_server_url) as board:
        board.hset(names.KEY_MODELS, mapping={"a": A.to_json(), "broken": b"\xff{", "other": '{"x": 1}'})
        board.sadd(names.KEY_WORKERS, b"\xff", "w-1")
        board.set(names.key_worker("w-1"), "[]")
    board_now = await route_map.read()
    assert (board_now.models, board_now.workers) == ({"a": A}, {})


async def test_changes_are_heard_from_others_and_from_us(route_map: RouteMap, redis_server_url: str) -> None:
    changes = route_map.changes()
    async with asyncio.timeout(10):
        await anext(changes)  # listening has begun
        await route_map.write_models([A], [])
        assert await anext(changes) == "models"
        with redis.Redis.from_url(redis_server_url) as board:
            board.publish(names.CHANNEL_CHANGES, "worker:w-1")
        assert await anext(changes) == "worker:w-1"
        await route_map.write_models([], [])
        await route_map.write_models([B], [])
        assert await anext(changes) == "models"
    await changes.aclose()  # type: ignore[attr-defined]


async def test_a_cancelled_read_ends(route_map: RouteMap) -> None:
    # Over and over, at other places of the read each time: none may go on as if nothing had been asked.
    for num_turns in range(60):
        task = asyncio.create_task(route_map.read())
        for _ in range(num_turns % 20):
            await asyncio.sleep(0)
        if task.done():
            continue
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("url", ["unix:///no/such.sock", "redis://127.0.0.1:1"])
async def test_a_redis_that_is_away_is_a_sentence(url: str) -> None:
    away = open_route_map(url)
    for call in (away.ping, away.read, lambda: away.write_models([A], []), lambda: anext(away.changes())):
        with pytest.raises(Unavailable, match=r"Redis does not answer .* check that it runs and --redis-url"):
            await call()
    await away.close()


def test_an_url_of_another_kind_is_a_sentence_without_the_url() -> None:
    with pytest.raises(Unavailable, match="begins with 'http'; write redis://host:port") as caught:
        open_route_map("http://user:secret@host")
    assert "secret" not in caught.value.message
