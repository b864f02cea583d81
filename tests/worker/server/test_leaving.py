"""A worker that is asked to end serves on until its models are ready elsewhere, then drains."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from redis_server import RedisServer
from tiny_models import TinySpec
from toy_worker import RunningWorker, ask, eventually, ids, running_worker, toy_settings
from worker_probes import health
from worker_process import worker_process

from naru_proto import names
from naru_proto.registry import ResidentRecord, WorkerRecord
from naru_worker.core.leaving import unmoved_models
from naru_worker.settings import RegistrySettings, WorkerSettings

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def settings(server: RedisServer, **more: Any) -> WorkerSettings:
    chosen = toy_settings(**{"move_timeout_s": 600.0, **more})
    return replace(chosen, registry=RegistrySettings(redis_url=server.url, lease_ttl_s=0.6))


def other(*models: str, state: str = "ready", generation: int = 0, **fields: Any) -> WorkerRecord:
    held = {name: ResidentRecord(state, generation) for name in models}
    return WorkerRecord("other", "h:1", "e", held, **fields)


def show(server: RedisServer, record: WorkerRecord) -> None:
    server.client.sadd(names.KEY_WORKERS, record.worker_id)
    server.client.set(names.key_worker(record.worker_id), record.to_json())


def lease(server: RedisServer, worker_id: str = "w") -> WorkerRecord | None:
    raw = server.client.get(names.key_worker(worker_id))
    return None if raw is None else WorkerRecord.from_json(str(raw))


async def leaving(worker: RunningWorker, server: RedisServer) -> None:
    """Asks it to end, and waits until its lease says so."""
    assert worker.app.end(may_move=True)
    await eventually(lambda: (found := lease(server)) is not None and found.leaving, "the lease does not say so")


async def test_it_serves_until_its_models_are_ready_elsewhere(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_worker(None, settings(redis_server), "a", "b") as worker:
        await leaving(worker, redis_server)
        show(redis_server, other("a"))
        await eventually(lambda: "not ready on another worker yet: b" in caplog.text, "it does not see the other one")
        assert len(ids(await worker.generate(ask("r", model="a")))) == 12
        assert not worker.app.stopping.is_set()
        assert await health(worker) == await health(worker, "ready") == SERVING
        show(redis_server, other("a", "b"))
        await eventually(worker.app.stopping.is_set, "it does not drain")
        assert "every model here is ready elsewhere; draining" in caplog.text
        assert await worker.app.shut_down() == 0


async def test_without_a_model_it_drains_at_once(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server)) as worker:
        await leaving(worker, redis_server)
        await eventually(worker.app.stopping.is_set, "it does not drain")


async def test_it_waits_no_longer_than_it_may(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(None, settings(redis_server, move_timeout_s=0.3), "a") as worker:
        assert worker.app.end(may_move=True)
        await eventually(worker.app.stopping.is_set, "it does not drain")
        assert "still not ready elsewhere: a; draining" in caplog.text


async def test_asked_again_it_drains_and_asked_once_more_there_is_nothing_left_to_ask(
    redis_server: RedisServer,
) -> None:
    async with running_worker(None, settings(redis_server), "a") as worker:
        await leaving(worker, redis_server)
        assert not worker.app.stopping.is_set()
        assert worker.app.end(may_move=True)
        assert worker.app.stopping.is_set()
        assert not worker.app.end(may_move=True)


@pytest.mark.parametrize(("move_timeout_s", "may_move"), [(0.0, True), (600.0, False)])
async def test_it_drains_at_once_where_nothing_is_to_move(
    redis_server: RedisServer, move_timeout_s: float, may_move: bool
) -> None:
    async with running_worker(None, settings(redis_server, move_timeout_s=move_timeout_s), "a") as worker:
        assert worker.app.end(may_move=may_move)
        assert worker.app.stopping.is_set() and not worker.app.is_leaving


async def test_while_redis_is_away_it_waits(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "a") as worker:
        await leaving(worker, redis_server)
        redis_server.stop()
        keeper = worker.app.lease
        assert keeper is not None
        await eventually(lambda: keeper.is_failing, "the outage is not noticed")
        assert await keeper.others() is None
        assert not worker.app.stopping.is_set()
        redis_server.start()
        show(redis_server, other("a"))
        await eventually(worker.app.stopping.is_set, "it does not drain")


async def test_a_lease_that_cannot_be_read_is_no_place_to_move_to(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "a") as worker:
        await eventually(lambda: lease(redis_server) is not None, "no lease")
        for name, data in (("broken", "{"), ("odd", json.dumps({"models": 5}))):
            redis_server.client.sadd(names.KEY_WORKERS, name)
            redis_server.client.set(names.key_worker(name), data)
        redis_server.client.sadd(names.KEY_WORKERS, "gone")
        show(redis_server, other("a"))
        keeper = worker.app.lease
        assert keeper is not None
        assert [found.worker_id for found in await keeper.others() or ()] == ["other"]


@pytest.mark.parametrize(
    ("found", "unmoved"),
    [
        ([], ["a", "b"]),
        ([other("a")], ["b"]),
        ([other("a"), other("b", "x")], []),
        ([other("a", "b", leaving=True)], ["a", "b"]),
        ([other("a", "b", draining=True)], ["a", "b"]),
        ([other("a", "b", state="loading")], ["a", "b"]),
        ([other("a", generation=-1), other("b", generation=7)], ["a"]),
        ([other("a", generation=-1), other("a", generation=0)], ["b"]),
    ],
)
def test_a_model_has_moved_when_it_is_ready_on_a_worker_that_stays(
    found: list[WorkerRecord], unmoved: list[str]
) -> None:
    assert unmoved_models({"b": 0, "a": 0}, found) == unmoved


async def test_readiness_needs_one_lease_and_then_no_redis(make_redis: Callable[[], RedisServer]) -> None:
    server = make_redis()
    async with running_worker(None, settings(server)) as worker:
        assert await health(worker, "ready") == NOT_SERVING
        assert await health(worker) == await health(worker, "naru.v1.Worker") == SERVING
        server.start()

        async def is_ready() -> bool:
            return bool(await health(worker, "ready") == SERVING)

        await eventually(is_ready, "it is not ready")
        server.stop()
        keeper = worker.app.lease
        assert keeper is not None
        await eventually(lambda: keeper.is_failing, "the outage is not noticed")
        assert await is_ready()


async def test_the_lease_tells_bytes_and_use_and_subscribers_hear_nothing_of_them(redis_server: RedisServer) -> None:
    async with running_worker(None, settings(redis_server), "toy") as worker:
        await eventually(lambda: (found := lease(redis_server)) is not None and bool(found.models), "no model is told")
        keeper = worker.app.lease
        assert keeper is not None
        # The lease can be read a moment before its keeper knows that it was written.
        await eventually(
            lambda: keeper._told is not None and any(each.state == "ready" for each in keeper._told.models.values()),
            "no lease with a ready model was written",
        )
        told = keeper._told
        await worker.generate(ask("r"))
        before = lease(redis_server)
        assert before is not None

        def is_used() -> bool:
            found = lease(redis_server)
            # A lease may have been written while the request ran.
            return found is not None and found.models["toy"].last_used_s > 0 and not found.models["toy"].num_in_flight

        await eventually(is_used, "its use is not told with a renewal")
        after = lease(redis_server)
        assert after is not None
        resident = after.models["toy"]
        assert (resident.weight_bytes, resident.num_in_flight) == (1000, 0)
        assert resident.kv_bytes == resident.num_bytes - resident.weight_bytes > 0
        assert resident.last_used_s % 60 == 0
        assert resident.since_s == before.models["toy"].since_s > resident.last_used_s - 60
        assert keeper._told == told


async def test_the_process_moves_at_the_first_signal_and_drains_at_the_second(
    redis_server: RedisServer, tiny_model: Callable[[TinySpec], Path]
) -> None:
    model = ("--load", f"toy=file://{tiny_model(TinySpec())}")
    flags = ("--redis-url", redis_server.url, "--worker-id", "w", "--move-timeout-s", "600")
    async with worker_process(*model, *flags) as worker:
        await worker.line("loaded toy")
        worker.signal(signal.SIGTERM)
        await eventually(lambda: (found := lease(redis_server)) is not None and found.leaving, "it does not say so")
        assert [d async for d in worker.stub.Generate(ask("r", max_tokens=4))][-1].request_done
        assert worker.process.returncode is None
        worker.signal(signal.SIGTERM)
        assert await worker.exit_code() == 0


async def test_health_is_answered_while_every_step_is_full(tiny_model: Callable[[TinySpec], Path]) -> None:
    async with worker_process("--load", f"toy=file://{tiny_model(TinySpec(max_positions=4096))}") as worker:
        await worker.line("loaded toy")
        calls = [worker.stub.Generate(ask(f"r{i}", max_tokens=2000)) for i in range(64)]
        for call in calls:
            await call.read()
        probe = RunningWorker(None, None, worker.channel, worker.stub)  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            assert [await health(probe, name) for name in ("", "ready", "naru.v1.Worker")] == [SERVING] * 3
        for call in calls:
            call.cancel()
