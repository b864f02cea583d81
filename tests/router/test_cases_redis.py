"""A Redis that hangs, is gone, empty, read-only or full: who asks for a model that is up notices nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_process import RedisProcess
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, poll
from stub_worker import say
from telling_worker import start_telling

from naru_proto import names
from naru_proto.tenants import Quotas, key_digest
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters import load_desk
from naru_router.adapters.leases import Leases, connect
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy import quota_keeper

FREE, COUNTED = "nk-free", "nk-counted"
RATE_PER_S = 20
MIN_REQUESTS = 12
"""During each outage."""


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.json"
    quotas = {"requestsPerMinute": 100_000, "tokensPerMinute": 10_000_000, "maxInFlight": 1000}
    tenants = [
        {"name": "free", "keys": [key_digest(FREE)]},
        {"name": "counted", "keys": [key_digest(COUNTED)], "quotas": quotas},
    ]
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path_factory.mktemp("own"))
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def own(own_redis: RedisProcess) -> AsyncIterator[Rig]:
    made = Rig(own_redis.url)
    yield made
    await made.close()


@pytest.fixture
async def second(own: Rig) -> AsyncIterator[Rig]:
    """Another router over the same board and workers."""
    made = Rig(own.redis_url)
    made.workers = own.workers
    yield made
    await made.close()


async def publish(rig: Rig) -> None:
    """What control plane and workers write again when it is gone."""
    await rig.publish_model()
    for worker_id in ("w0", "w1"):
        await rig.publish_worker(worker_id)


async def started(rig: Rig, tenants_file: str) -> None:
    await rig.publish_model()
    for worker_id in ("w0", "w1"):
        await start_telling(rig, worker_id, say("Hel", "lo"), rate=1000.0)
    await rig.start_router(tenants_file=tenants_file, registry_poll_s=0.1)


class Traffic:
    """Requests at a steady rate, for as long as the context lasts. None may fail."""

    def __init__(self, *routers: Rig) -> None:
        self._routers = routers
        self.num_served = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Traffic:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def further(self, count: int) -> None:
        """Returns when so many more are served; fails as soon as one is not."""
        goal = self.num_served + count

        async def is_reached() -> bool:
            assert self._task is not None
            if self._task.done():
                self._task.result()
            return self.num_served >= goal

        await poll(is_reached)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            number = 0
            while True:
                group.create_task(self._ask(number))
                number += 1
                await asyncio.sleep(1 / RATE_PER_S)

    async def _ask(self, number: int) -> None:
        path, key = (CHAT, COMPLETION)[number % 2], (FREE, COUNTED)[number // 2 % 2]
        router = self._routers[number % 3 % len(self._routers)]
        reply = await router.client.post(path, json=body(path), headers={"x-api-key": key})
        assert reply.status_code == 200, reply.text
        self.num_served += 1


class Outage:
    """Redis as it may fail, and come back."""

    def __init__(self, rig: Rig, process: RedisProcess) -> None:
        self._rig = rig
        self._process = process

    @contextlib.asynccontextmanager
    async def hangs(self) -> AsyncIterator[str]:
        with self._process.hanging():
            yield "registry"

    @contextlib.asynccontextmanager
    async def is_gone(self) -> AsyncIterator[str]:
        self._process.stop()
        yield "registry"
        self._process.start()
        await publish(self._rig)

    @contextlib.asynccontextmanager
    async def is_empty(self) -> AsyncIterator[str]:
        await self._rig.board.flushall()
        yield ""
        await publish(self._rig)

    @contextlib.asynccontextmanager
    async def is_read_only(self) -> AsyncIterator[str]:
        await self._rig.board.replicaof("127.0.0.1", "1")
        yield "routers"
        await self._rig.board.replicaof("NO", "ONE")

    @contextlib.asynccontextmanager
    async def is_full(self) -> AsyncIterator[str]:
        await self._rig.board.config_set("maxmemory-policy", "noeviction")
        await self._rig.board.config_set("maxmemory", 1)
        yield "routers"
        await self._rig.board.config_set("maxmemory", 0)


async def detail(rig: Rig) -> dict[str, Any]:
    """Of readiness, which stays."""
    page = await rig.client.get("/readyz")
    assert page.status_code == 200 and page.json()["status"] == "ready"
    assert (await rig.client.get("/ready")).status_code == 200
    found: dict[str, Any] = page.json()
    return found


def problems(found: dict[str, Any]) -> dict[str, str | None]:
    return {
        "registry": found["registry"]["problem"],
        "routers": found["routers"]["problem"],
        "quotas": found["tenancy"]["quotas"]["problem"],
    }


@pytest.mark.parametrize("kind", ["hangs", "is_gone", "is_empty", "is_read_only", "is_full"])
async def test_every_request_is_served_whatever_becomes_of_redis(
    own: Rig,
    second: Rig,
    own_redis: RedisProcess,
    tenants_file: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(quota_keeper, "PAUSE_S", 0.05)  # more tries, more occasions to complain
    await started(own, tenants_file)
    await second.start_router(tenants_file=tenants_file, registry_poll_s=0.1)
    outage: Callable[[], contextlib.AbstractAsyncContextManager[str]] = getattr(Outage(own, own_redis), kind)
    async with Traffic(own, second) as traffic:
        await traffic.further(4)
        caplog.set_level(logging.INFO, "naru_router")
        caplog.clear()
        async with outage() as part:

            async def is_told() -> bool:
                return not part or all([problems(await detail(router))[part] for router in (own, second)])

            await poll(is_told)
            await traffic.further(MIN_REQUESTS)

        async def is_well() -> bool:
            return not any([*problems(await detail(own)).values(), *problems(await detail(second)).values()])

        await poll(is_well)
        await traffic.further(4)
    lines = Counter((record.name, record.msg) for record in caplog.records if record.name.startswith("naru_router"))
    assert max(lines.values(), default=0) <= 2, "said once by each router, not at each request or reading"
    for router in (own, second):
        assert set(router.app.fleet.route_map.models) == {MODEL} and router.app.fleet.num_up() == 2
    assert own.app.registry.seed == second.app.registry.seed
    assert await own.board.get(names.KEY_SEED) == own.app.registry.seed != b""


async def test_a_request_for_a_model_that_is_up_sends_redis_nothing(own: Rig, tenants_file: str) -> None:
    """What a router asks in the quiet it asks under load, and nothing else but to count what tenants have used."""
    await started(own, tenants_file)
    seen: Counter[str] = Counter()
    async with own.board.monitor() as monitor:

        async def listen() -> None:
            async for command in monitor.listen():
                words = command["command"].split(" ")
                seen[" ".join(words[:2])] += 1

        listener = asyncio.create_task(listen())

        async def is_quiet_known() -> bool:
            rounds = (f"HGETALL {names.KEY_MODELS}", f"SRANDMEMBER {names.KEY_ROUTERS}")
            return all(seen[each] >= 3 for each in rounds) and seen[f"PEXPIRE {names.KEY_KEEPER}"] >= 1

        await poll(is_quiet_known)
        quiet = set(seen)
        seen.clear()
        for number in range(100):
            path = (CHAT, COMPLETION)[number % 2]
            sent = body(path, model=MODEL, user=f"number {number}")
            assert (await own.client.post(path, json=sent, headers={"x-api-key": FREE})).status_code == 200
        await poll(lambda: is_read_after(seen))
        loaded = seen.copy()
        seen.clear()
        for _ in range(100):
            reply = await own.client.post(COMPLETION, json=body(COMPLETION), headers={"x-api-key": COUNTED})
            assert reply.status_code == 200
        await poll(lambda: is_read_after(seen))
        listener.cancel()
    assert set(loaded) <= quiet, "no command that requests are the reason for"
    exchanges = sum(count for command, count in seen.items() if command.startswith("EVALSHA"))
    # Two quotas for each of the hundred would be 200; how many fewer depends on how fast they come.
    assert exchanges < 150, "shares are taken ahead of use, for many requests at once"


async def is_read_after(seen: Counter[str]) -> bool:
    """Whether Redis has told of all commands up to now: a reading of the map has followed."""
    return seen[f"HGETALL {names.KEY_MODELS}"] >= 1


@pytest.mark.parametrize("kind", ["is_read_only", "is_full"])
async def test_a_redis_that_can_only_be_read_shares_out_no_quotas_until_it_can_be_written(
    own: Rig, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO, "naru_router")
    client = connect(own_redis.url)
    keeper = quota_keeper.QuotaKeeper(client, "r1", lambda: 1, Metrics())
    running = asyncio.create_task(keeper.run())
    quotas = Quotas(requests_per_minute=100)
    await keeper.admit("t", quotas, 1)
    outage: Callable[[], contextlib.AbstractAsyncContextManager[str]] = getattr(Outage(own, own_redis), kind)
    async with outage():
        for number in range(10):
            await keeper.admit(f"t{number}", quotas, 1)
            await keeper._exchange([])  # while nothing is due
            assert keeper.problem
    await keeper._exchange([])
    assert not keeper.problem
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert Counter(record.levelname for record in caplog.records) == {"WARNING": 1, "INFO": 1}
    await client.aclose()


@pytest.mark.parametrize("kind", ["is_read_only", "is_full"])
async def test_a_redis_that_can_only_be_read_gives_out_no_leases_and_is_complained_of_once(
    own: Rig, own_redis: RedisProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(load_desk, "AWAY_S", 0.01)
    caplog.set_level(logging.INFO, "naru_router")
    client = connect(own_redis.url)
    assert await Leases(client, "r0").take("before", 0.001), "there are leases, and a counter of their tokens"
    desk = load_desk.LoadDesk(Leases(client, "r1"), Nobody(), router_id="r1")
    outage: Callable[[], contextlib.AbstractAsyncContextManager[str]] = getattr(Outage(own, own_redis), kind)
    async with outage():
        for _ in range(5):
            assert await desk.where(MODEL, lambda avoid: "w0") is None
            assert desk.is_away
            await asyncio.sleep(0.05)  # for some probes

    async def is_well() -> bool:
        return not desk.is_away

    await poll(is_well)
    assert Counter(record.levelname for record in caplog.records) == {"WARNING": 1, "INFO": 1}
    await desk.close()
    await client.aclose()


class Nobody:
    """Workers that a load desk asks nothing of."""

    async def move(self, worker_id: str, request: wire.MoveRequest, timeout_s: float) -> wire.MoveReply:
        raise AssertionError("without a lease nobody is told to load")

    def can_load(self, worker_id: str, model: str) -> bool:
        return True

    def state(self, worker_id: str, model: str) -> str:
        return ""

    def is_served(self, model: str) -> bool:
        return False

    def mark_unknown(self, worker_id: str, model: str) -> None:
        raise AssertionError("nobody was asked")

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
