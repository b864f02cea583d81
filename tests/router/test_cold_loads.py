"""One load over all routers, what those hear who cannot wait for it, and what a lost worker or Redis changes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from cold_worker import ColdWorker
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, poll

from naru_proto import names
from naru_proto.registry import FootprintRecord, LeaseRecord

if TYPE_CHECKING:
    from redis_process import RedisProcess

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


async def cold_workers(rig: Rig, count: int = 2, **settings: Any) -> list[ColdWorker]:
    await rig.publish_model(on_demand=True, pools=("default",))
    workers = [ColdWorker(rig) for _ in range(count)]
    for index, worker in enumerate(workers):
        worker.may_load.clear()
        await worker.start(f"w{index}")
    await rig.start_router(**settings)
    return workers


async def lease(rig: Rig) -> LeaseRecord | None:
    text = await rig.board.get(names.key_load_lease(MODEL))
    return None if text is None else LeaseRecord.from_json(text)


async def loading(workers: list[ColdWorker]) -> ColdWorker:
    """The one that loads."""
    async with asyncio.timeout(10):
        while not any(worker.num_loads for worker in workers):
            waits = [asyncio.ensure_future(worker.stub.changed.wait()) for worker in workers]
            await asyncio.wait(waits, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
    return next(worker for worker in workers if worker.num_loads)


async def test_two_hundred_first_requests_on_two_routers_are_answered_by_one_load(rig: Rig, second: Rig) -> None:
    workers = await cold_workers(rig, 3, model_wait_s=60.0)
    await second.start_router(model_wait_s=60.0)
    requests = []
    for index in range(200):
        path = CHAT if index % 3 else COMPLETION
        router = (rig, second)[index % 2]
        requests.append(asyncio.create_task(router.post(path, body(path))))
    home = await loading(workers)
    await home.stub.until(lambda: len(home.stub.running) >= 67 + 2)
    home.may_load.set()
    answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 200
    assert sum(worker.num_loads for worker in workers) == 1
    assert [len(worker.stub.moves) for worker in workers] == [1 if worker is home else 0 for worker in workers]
    assert not any(worker.stub.requests for worker in workers if worker is not home)
    move = home.stub.moves[0]
    assert move.model == MODEL and move.for_request and move.fencing_token > 0
    await poll(lambda: _is_free(rig))


async def _is_free(rig: Rig) -> bool:
    return await lease(rig) is None


@BOTH
async def test_a_worker_lost_while_it_loads_is_followed_by_another_under_a_newer_token(rig: Rig, path: str) -> None:
    workers = await cold_workers(rig)
    request = asyncio.create_task(rig.post(path, body(path)))
    first = await loading(workers)
    await first.stub.until(lambda: len(first.stub.running) == 1)
    other = next(worker for worker in workers if worker is not first)
    other.may_load.set()
    await first.stub.kill()
    assert (await request).status_code == 200
    assert [len(worker.stub.moves) for worker in (first, other)] == [1, 1]
    assert first.stub.moves[0].fencing_token < other.stub.moves[0].fencing_token
    first.may_load.set()


@BOTH
async def test_a_load_goes_on_when_all_who_waited_have_left(rig: Rig, path: str) -> None:
    workers = await cold_workers(rig)
    requests = [asyncio.create_task(rig.post(path, body(path))) for _ in range(3)]
    home = await loading(workers)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 0)
    assert await lease(rig) is not None
    home.may_load.set()
    assert (await rig.post(path, body(path))).status_code == 200
    assert sum(worker.num_loads for worker in workers) == 1


@BOTH
async def test_a_wait_that_the_worker_calls_hopeless_is_refused_at_once_and_the_load_goes_on(
    rig: Rig, path: str
) -> None:
    (worker,) = await cold_workers(rig, 1, model_wait_s=20.0)
    worker.eta_s = 120.0
    started_s = time.monotonic()
    response = await rig.post(path, body(path))
    assert time.monotonic() - started_s < 15.0, "it waited for nothing"
    assert response.status_code == 503 and "is being loaded" in response.json()["error"]["message"]
    assert 100 < int(response.headers["retry-after"]) <= 132
    assert worker.num_loads == 1
    worker.may_load.set()
    await rig.until(lambda: rig.app.fleet.is_ready("w0", MODEL))
    assert (await rig.post(path, body(path))).status_code == 200
    assert worker.num_loads == 1


@BOTH
async def test_a_full_waiting_room_says_when_the_load_will_be_done(rig: Rig, path: str) -> None:
    (worker,) = await cold_workers(rig, 1, max_waiting_per_model=1, model_wait_s=20.0)
    worker.eta_s = 15.0
    waiting = asyncio.create_task(rig.post(path, body(path)))
    await rig.until(lambda: rig.app.fleet.route_map.eta_s(MODEL) > 0)
    response = await rig.post(path, body(path))
    assert response.status_code == 429
    assert 10 <= int(response.headers["retry-after"]) <= 17
    worker.may_load.set()
    assert (await waiting).status_code == 200


async def test_the_end_of_a_wait_tells_what_the_last_load_took(rig: Rig) -> None:
    record = FootprintRecord(1, 1, load_s=40.0)
    await rig.board.hset(names.KEY_FOOTPRINTS, MODEL, record.to_json())
    (worker,) = await cold_workers(rig, 1, model_wait_s=0.5)
    response = await rig.post(COMPLETION, body(COMPLETION))
    assert response.status_code == 503 and "still loading" in response.json()["error"]["message"]
    assert 45 <= int(response.headers["retry-after"]) <= 50
    worker.may_load.set()


async def test_a_redis_that_hangs_lets_all_routers_ask_the_same_worker(
    rig: Rig, second: Rig, redis_process: RedisProcess
) -> None:
    workers = await cold_workers(rig, 3, model_wait_s=60.0)
    await second.start_router(model_wait_s=60.0)
    with redis_process.hanging():
        requests = [asyncio.create_task((rig, second)[i % 2].post(COMPLETION, body(COMPLETION))) for i in range(20)]
        async with asyncio.timeout(10):
            while sum(len(worker.stub.running) for worker in workers) < 20:
                await rig.app.fleet.changed(0.02)
        asked = [worker for worker in workers if worker.stub.requests]
        assert len(asked) == 1 and len(asked[0].stub.requests) == 20
        assert not any(worker.stub.moves for worker in workers)
    asked[0].may_load.set()
    assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200] * 20
    assert sum(worker.num_loads for worker in workers) == 1
