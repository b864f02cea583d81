"""The worker's lease in a real Redis: written, renewed, lost, and back by itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis_server import RedisServer
from toy_worker import RunningWorker, ToyLoader, ask, eventually, ids, running_worker, toy_settings

from naru_proto import names
from naru_proto.registry import ModelInfoRecord, WorkerRecord
from naru_proto.v1 import worker_pb2
from naru_worker.settings import RegistrySettings, WorkerSettings

TTL_S = 0.3
LONG_TTL_S = 1.5
"""Of a lease that is to be there all the time, on a machine that may stand still for half a second."""


def settings(server: RedisServer, ttl_s: float = TTL_S, **more: Any) -> WorkerSettings:
    registry = RegistrySettings(redis_url=server.url, pool="gold", lease_ttl_s=ttl_s)
    return replace(toy_settings(**more), registry=registry)


def record(server: RedisServer, worker_id: str = "w") -> WorkerRecord | None:
    raw = server.client.get(names.key_worker(worker_id))
    return None if raw is None else WorkerRecord.from_json(str(raw))


async def until(server: RedisServer, what: str, check: Callable[[WorkerRecord], bool]) -> WorkerRecord:
    """The record once `check` holds for it."""
    found: list[WorkerRecord] = []

    def holds() -> bool:
        current = record(server)
        if current is not None and check(current):
            found.append(current)
        return bool(found)

    await eventually(holds, what)
    return found[0]


async def serves(worker: RunningWorker) -> bool:
    return len(ids(await worker.generate(ask("r")))) == 12


async def test_the_lease_tells_address_epoch_pool_and_models(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "toy") as worker:
        lease = await until(redis_server, "ready", lambda r: bool(r.models) and r.models["toy"].state == "ready")
        assert (lease.worker_id, lease.address, lease.pool) == ("w", worker.app.address, "gold")
        assert lease.epoch == (await worker.stub.Describe(worker_pb2.DescribeRequest())).epoch
        assert redis_server.client.sismember(names.KEY_WORKERS, "w")
        digest = lease.models["toy"].info_digest
        info = ModelInfoRecord.from_json(str(redis_server.client.get(names.key_model_info(digest))))
        assert info.digest() == digest
        assert (info.architecture, info.chat_template) == ("toy", "{{ messages }}")
    assert record(redis_server) is None
    assert not redis_server.client.sismember(names.KEY_WORKERS, "w")


async def test_the_lease_is_renewed_before_it_expires_and_expires_when_nobody_renews(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_worker(None, settings(redis_server, LONG_TTL_S)) as worker:
        await until(redis_server, "lease", lambda r: True)
        # Two lives of a lease: at no time is it gone.
        for _ in range(40):
            assert record(redis_server) is not None
            await asyncio.sleep(LONG_TTL_S / 20)
        lease_task = next(t for t in worker.app._tasks if "LeaseKeeper.run" in repr(t.get_coro()))
        lease = worker.app.lease
        assert lease is not None
        # What a kill leaves: nothing is deleted.
        monkeypatch.setattr(lease, "_leave", lease._client.aclose)
        lease_task.cancel()
        await eventually(lambda: record(redis_server) is None, "the lease does not expire")


async def test_at_rest_a_lease_is_renewed_in_one_exchange_and_nothing_is_worked_out_anew(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls() -> dict[str, int]:
        stats: Any = redis_server.client.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}

    async with running_worker(None, settings(redis_server, LONG_TTL_S), "toy") as worker:
        await until(redis_server, "ready", lambda r: bool(r.models) and r.models["toy"].state == "ready")
        assert worker.app.lease is not None
        monkeypatch.setattr(ModelInfoRecord, "digest", lambda self: pytest.fail("the digest of an info is known"))
        await eventually(lambda: calls().get("expire", 0) >= 2, "infos are not renewed")
        written = worker.app.lease._last
        redis_server.client.config_resetstat()
        await eventually(lambda: calls().get("set", 0) >= 4, "the lease is not renewed")
        assert calls().keys() - {"info", "config", "config|resetstat"} == {"set", "sadd", "expire"}
        assert worker.app.lease._last is not None and written is not None
        assert worker.app.lease._last[1] is written[1], "the text of an entry that is the same is made once"
        assert not worker.app.lease.is_failing


async def test_a_lease_that_is_lost_between_two_renewals_comes_back_with_all_that_goes_with_it(
    redis_server: RedisServer,
) -> None:
    async with running_worker(ToyLoader(on_disk={"toy://near": 70}), settings(redis_server), "toy") as worker:
        await worker.load("near", "toy://near", tier=worker_pb2.TIER_COLD)
        await until(redis_server, "ready", lambda r: bool(r.models) and r.models["toy"].state == "ready")
        known, client = names.key_known("w"), redis_server.client
        await eventually(lambda: bool(client.hexists(known, "near")), "what is near is not told")
        for lost in ([names.key_worker("w"), known, names.KEY_FOOTPRINTS], [names.key_worker("w"), names.KEY_WORKERS]):
            client.delete(*lost)
            await eventually(lambda lost=lost: client.exists(*lost) == len(lost), "not all of it came back")


async def test_changes_are_told_to_subscribers_and_shown_at_once(redis_server: RedisServer) -> None:
    heard = redis_server.client.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
    heard.subscribe(names.CHANNEL_CHANGES)
    assert heard.get_message(timeout=5.0) is None, "the answer to subscribe comes first, and is no message"
    loader = ToyLoader(opening={"toy://a": (gate := threading.Event())})
    async with running_worker(loader, settings(redis_server)) as worker:
        load = asyncio.create_task(worker.load(generation=4))
        fetching = await until(redis_server, "fetching", lambda r: bool(r.models) and r.models["toy"].bytes_done > 0)
        assert (fetching.models["toy"].state, fetching.models["toy"].bytes_total) == ("fetching", 1000)
        gate.set()
        await load
        ready = await until(redis_server, "ready", lambda r: r.models["toy"].state == "ready")
        assert ready.models["toy"].generation == 4
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy", generation=5))
        gone = await until(redis_server, "gone", lambda r: not r.models)
        assert gone.epoch == ready.epoch, "the worker is the same one"
        await worker.load(generation=6)
        again = await until(redis_server, "again", lambda r: bool(r.models) and r.models["toy"].state == "ready")
        assert again.models["toy"].epoch > ready.models["toy"].epoch
        await worker.stub.Drain(worker_pb2.DrainRequest())
        await until(redis_server, "draining", lambda r: r.draining)
    messages = []
    while (message := heard.get_message(timeout=0.2)) is not None:
        messages.append(message["data"])
    assert set(messages) == {"worker:w"}
    assert len(messages) >= 5
    heard.close()


async def test_what_happens_to_models_is_told_in_the_stream_of_events(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server)) as worker:
        await worker.load()
        await worker.stub.Unload(worker_pb2.UnloadRequest(model="toy"))
        told: list[dict[str, str]] = []

        def is_whole() -> bool:
            entries: Any = redis_server.client.xrange(names.KEY_EVENTS)
            told[:] = [fields for _, fields in entries]
            return bool(told) and told[-1]["to"] == "cold"

        await eventually(is_whole, "the end is not told")
        assert [(e["from"], e["to"]) for e in told] == [
            ("cold", "fetching"),
            ("fetching", "loading"),
            ("loading", "ready"),
            ("ready", "draining"),
            ("draining", "cold"),
        ]
        assert {(e["worker"], e["model"]) for e in told} == {("w", "toy")}
        assert all(e["reason"] and int(e["at_ms"]) > 0 and e["epoch"] for e in told)
        await eventually(lambda: not worker.app.hub.changes, "told events are kept")


async def test_a_failed_load_shows_its_reason(redis_server: RedisServer) -> None:
    loader = ToyLoader(errors={"toy://a": ValueError("odd")})
    async with running_worker(loader, settings(redis_server)) as worker:
        await worker.load()
        failed = await until(redis_server, "failed", lambda r: bool(r.models) and r.models["toy"].state == "failed")
        assert "ValueError" in failed.models["toy"].error


async def test_serving_goes_on_while_redis_is_away_and_the_lease_comes_back(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_worker(None, settings(redis_server), "toy") as worker:
        lease = worker.app.lease
        assert lease is not None
        await until(redis_server, "ready", lambda r: bool(r.models) and r.models["toy"].state == "ready")
        with caplog.at_level(logging.WARNING):
            redis_server.stop()
            await eventually(lambda: lease._num_failures >= 3, "no retry")
            assert await serves(worker)
            assert worker.app.health.is_serving
            redis_server.start()
            await until(redis_server, "back", lambda r: r.models["toy"].state == "ready")
            # The entry is there before the worker has read that it was written.
            await eventually(lambda: not lease.is_failing, "the lease did not come back")
        told = [r.message for r in caplog.records if r.name.endswith("registry")]
        assert len(told) == 2, "once when it goes, once when it is back"
        # An empty board is filled again, infos included.
        redis_server.client.flushall()
        back = await until(redis_server, "refilled", lambda r: bool(r.models))
        key = names.key_model_info(back.models["toy"].info_digest)
        await eventually(lambda: bool(redis_server.client.exists(key)), "the model info did not come back")


async def test_a_redis_that_hangs_does_not_hang_the_worker(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "toy") as worker:
        lease = worker.app.lease
        assert lease is not None
        await until(redis_server, "lease", lambda r: True)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: lease.is_failing, "a hanging Redis is not noticed")
            assert await serves(worker)
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await eventually(lambda: not lease.is_failing, "the lease did not come back")


async def test_a_redis_that_refuses_writes_is_no_reason_to_stop(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "toy") as worker:
        lease = worker.app.lease
        assert lease is not None
        await until(redis_server, "lease", lambda r: True)
        redis_server.client.replicaof("127.0.0.1", "1")
        await eventually(lambda: lease.is_failing, "a read-only Redis is not noticed")
        assert await serves(worker)
        redis_server.client.replicaof("NO", "ONE")
        await eventually(lambda: not lease.is_failing, "the lease did not come back")


async def test_a_worker_starts_without_redis_and_appears_when_it_comes(make_redis: Callable[[], RedisServer]) -> None:
    server: RedisServer = make_redis()
    async with running_worker(None, settings(server), "toy") as worker:
        assert await serves(worker)
        server.start()
        await until(server, "lease", lambda r: r.models["toy"].state == "ready")
