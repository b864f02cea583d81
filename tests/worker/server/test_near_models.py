"""What a worker tells of models that it does not hold, and of what its models take, in a real Redis."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

from redis_server import RedisServer
from toy_worker import WEIGHT_BYTES, ToyLoader, eventually, running_worker, toy_settings

from naru_proto import names
from naru_proto.placement import slots_of
from naru_proto.placement.model import Near
from naru_proto.registry import FootprintRecord, KnownRecord, WorkerRecord
from naru_proto.v1 import worker_pb2
from naru_worker.settings import RegistrySettings, WorkerSettings


def settings(server: RedisServer, **more: Any) -> WorkerSettings:
    plain = toy_settings()
    return replace(
        plain,
        memory=replace(plain.memory, host_budget_bytes=10**6),
        registry=RegistrySettings(redis_url=server.url, lease_ttl_s=0.3, **more),
    )


def known(server: RedisServer, worker_id: str = "w") -> dict[str, KnownRecord]:
    stored: Any = server.client.hgetall(names.key_known(worker_id))
    return {name: KnownRecord.from_json(text) for name, text in stored.items()}


def footprints(server: RedisServer) -> dict[str, FootprintRecord]:
    stored: Any = server.client.hgetall(names.KEY_FOOTPRINTS)
    return {name: FootprintRecord.from_json(text) for name, text in stored.items()}


def lease(server: RedisServer) -> WorkerRecord | None:
    text = server.client.get(names.key_worker("w"))
    return None if text is None else WorkerRecord.from_json(str(text))


async def test_models_whose_files_are_here_are_told_until_they_are_held_or_the_worker_ends(
    redis_server: RedisServer,
) -> None:
    loader = ToyLoader(on_disk={"toy://near": 70})
    async with running_worker(loader, settings(redis_server)) as worker:
        await worker.load("near", "toy://near", tier=worker_pb2.TIER_COLD)
        await worker.load("far", "toy://far", tier=worker_pb2.TIER_COLD)
        await eventually(lambda: known(redis_server) == {"near": KnownRecord("disk", 70)}, "not told")
        assert 0 < redis_server.client.pttl(names.key_known("w")) <= 30_000
        first = lease(redis_server)
        assert first is not None
        # What was fetched for a load is here when the model leaves.
        loader.on_disk["toy://far"] = 90
        await worker.load("far", "toy://far", generation=1)
        await worker.load("near", "toy://near", generation=1)
        await eventually(lambda: not known(redis_server), "held models are told as near")
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="far", generation=1, tier=worker_pb2.TIER_COLD))
        await eventually(lambda: known(redis_server) == {"far": KnownRecord("disk", WEIGHT_BYTES)}, "not told again")
        await eventually(
            lambda: (now := lease(redis_server)) is not None and now.known_version > first.known_version, "same version"
        )
    assert not redis_server.client.exists(names.key_known("w"))


async def test_a_model_in_host_memory_is_the_nearest(redis_server: RedisServer) -> None:
    async with running_worker(ToyLoader(), settings(redis_server)) as worker:
        await worker.load("m", "toy://m", tier=worker_pb2.TIER_HOST)
        await eventually(lambda: known(redis_server) == {"m": KnownRecord("host", WEIGHT_BYTES)}, "not told")
        found = lease(redis_server)
        assert found is not None
        assert found.host_used_bytes == WEIGHT_BYTES
        (slot,) = slots_of({"w": found}, known={"w": known(redis_server)})
        assert slot.near == {"m": Near.HOST}


async def test_each_load_tells_what_a_copy_takes(redis_server: RedisServer) -> None:
    async with running_worker(ToyLoader(), settings(redis_server)) as worker:
        await worker.load("m", "toy://m")
        await eventually(lambda: "m" in footprints(redis_server), "no footprint")
        found = footprints(redis_server)["m"]
        entry = worker.app.hub.core.entry("m")
        assert entry is not None
        assert entry.footprint is not None
        assert (found.weight_bytes, found.kv_min_bytes) == (WEIGHT_BYTES, entry.footprint.kv_floor_bytes)
        assert found.load_s == round(entry.load_s, 3)
        assert found.fetch_s == 0.0, "nothing was fetched"
    assert "m" in footprints(redis_server), "it is true elsewhere too"


async def test_a_load_that_had_to_fetch_tells_how_long_that_took(redis_server: RedisServer) -> None:
    loader = ToyLoader(opening={"toy://m": (gate := threading.Event())})
    async with running_worker(loader, settings(redis_server)) as worker:
        load = asyncio.create_task(worker.load("m", "toy://m"))
        await eventually(
            lambda: (r := worker.app.hub.resident("m")) is not None and r.progress.bytes_done > 0, "no progress"
        )
        gate.set()
        await load
        await eventually(lambda: "m" in footprints(redis_server), "no footprint")
        found = footprints(redis_server)["m"]
        assert found.fetch_s > found.load_s


async def test_an_emptied_redis_is_told_all_of_it_again(redis_server: RedisServer) -> None:
    loader = ToyLoader(on_disk={"toy://near": 70})
    async with running_worker(loader, settings(redis_server)) as worker:
        await worker.load("m", "toy://m")
        await worker.load("near", "toy://near", tier=worker_pb2.TIER_COLD)
        await eventually(lambda: bool(known(redis_server)) and bool(footprints(redis_server)), "not told")
        redis_server.client.flushall()
        # Another worker may have told of its own since.
        redis_server.client.hset(names.KEY_FOOTPRINTS, "other", FootprintRecord(1, 1).to_json())
        await eventually(lambda: known(redis_server) == {"near": KnownRecord("disk", 70)}, "what is near is lost")
        await eventually(lambda: set(footprints(redis_server)) == {"m", "other"}, "the footprint is lost")


async def test_the_lease_says_where_the_worker_stands(redis_server: RedisServer) -> None:
    where = {"node": "n1", "domains": ("topology.kubernetes.io/zone=a", "rack=7")}
    async with running_worker(ToyLoader(), settings(redis_server, **where)):
        await eventually(lambda: lease(redis_server) is not None, "no lease")
        found = lease(redis_server)
        assert found is not None
        assert (found.node, found.num_accelerators) == ("n1", 1)
        assert found.domains == {"topology.kubernetes.io/zone": "a", "rack": "7"}
        assert found.host_budget_bytes == 10**6
