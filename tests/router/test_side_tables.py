"""Footprints, nodes, and what workers have near: read from a real Redis when they change, damage and all."""

from __future__ import annotations

import json
from typing import cast

import redis.asyncio
from redis_process import RedisProcess

from naru_proto import names
from naru_proto.registry import FootprintRecord, KnownRecord, WorkerRecord
from naru_router.adapters.side_tables import SLOW_INTERVAL_S, SideTables


class Counting(redis.asyncio.Redis):
    """Counts exchanges."""

    num_exchanges = 0

    def pipeline(self, *args: object, **kwargs: object) -> redis.asyncio.client.Pipeline:
        pipe = super().pipeline(transaction=False)
        execute = pipe.execute

        async def counted(raise_on_error: bool = True) -> list[object]:
            self.num_exchanges += 1
            return await execute(raise_on_error)

        pipe.execute = counted  # type: ignore[method-assign]
        return pipe


def worker(worker_id: str, version: int = 1, epoch: str = "e") -> WorkerRecord:
    return WorkerRecord(worker_id, "h:1", epoch, {}, known_version=version)


async def test_a_workers_table_is_read_again_when_its_lease_says_so(redis_process: RedisProcess) -> None:
    redis_process.flush()
    client = cast(Counting, Counting.from_url(redis_process.url))
    tables = SideTables(lambda: 0.0)
    key = names.key_known("w")
    await client.hset(key, "a", KnownRecord("host", 7).to_json())
    await tables.refresh(client, {"w": worker("w"), "other": worker("other")})
    assert tables.known == {"w": {"a": KnownRecord("host", 7)}, "other": {}}
    await client.hset(key, "b", KnownRecord("disk").to_json())
    before = client.num_exchanges
    await tables.refresh(client, {"w": worker("w"), "other": worker("other")})
    assert client.num_exchanges == before and set(tables.known["w"]) == {"a"}
    await tables.refresh(client, {"w": worker("w", 2)})
    assert tables.known == {"w": {"a": KnownRecord("host", 7), "b": KnownRecord("disk")}}
    await client.delete(key)
    await tables.refresh(client, {"w": worker("w", 2, epoch="another life")})
    assert tables.known == {"w": {}}
    await client.aclose()


async def test_a_hundred_workers_cost_two_exchanges(redis_process: RedisProcess) -> None:
    redis_process.flush()
    client = cast(Counting, Counting.from_url(redis_process.url))
    tables = SideTables(lambda: 0.0)
    await tables.refresh(client, {})
    client.num_exchanges = 0
    workers = {f"w{i}": worker(f"w{i}") for i in range(100)}
    for worker_id in workers:
        await client.hset(names.key_known(worker_id), "m", KnownRecord("disk", 1).to_json())
    await tables.refresh(client, workers)
    assert client.num_exchanges == 2 and {len(table) for table in tables.known.values()} == {1}
    await client.aclose()


async def test_footprints_and_nodes_are_read_now_and_then(redis_process: RedisProcess) -> None:
    redis_process.flush()
    client = redis.asyncio.Redis.from_url(redis_process.url)
    now_s = 0.0
    tables = SideTables(lambda: now_s)
    await tables.refresh(client, {})
    footprint = FootprintRecord(1, 2, 3, 0.5)
    await client.hset(names.KEY_FOOTPRINTS, "m", footprint.to_json())
    await client.hset(names.KEY_NODES, "n", json.dumps({"zone": "a"}))
    await tables.refresh(client, {})
    assert tables.footprints == {} == tables.nodes
    now_s = SLOW_INTERVAL_S
    await tables.refresh(client, {})
    assert tables.footprints == {"m": footprint} and tables.nodes == {"n": {"zone": "a"}}
    await client.aclose()


async def test_damage_costs_the_damaged_alone(redis_process: RedisProcess) -> None:
    redis_process.flush()
    client = redis.asyncio.Redis.from_url(redis_process.url)
    sound = KnownRecord("disk", 1)
    damaged = [b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"tier": 5}', b'{"tier": "disk", "num_bytes": -1}']
    await client.hset(
        names.key_known("w"), mapping={"ok": sound.to_json(), **{f"b{i}": d for i, d in enumerate(damaged)}}
    )
    await client.set(names.key_known("no hash"), "text")
    await client.set(names.KEY_FOOTPRINTS, "text")
    await client.hset(names.KEY_NODES, mapping={"n": b"[" * 100_000, "o": b'{"zone": "a"}', "p": b'{"zone": 5}'})
    tables = SideTables(lambda: 0.0)
    await tables.refresh(client, {each: worker(each) for each in ("w", "no hash")})
    assert tables.known == {"w": {"ok": sound}, "no hash": {}}
    assert tables.footprints == {} and tables.nodes == {"o": {"zone": "a"}}
    await client.aclose()
