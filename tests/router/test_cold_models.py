"""Requests for models that no worker has ready: who is asked to load them, who waits where, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from cold_worker import ColdWorker
from router_rig import CHAT, COMPLETION, MODEL, Rig, body
from stub_worker import fail, hang, say

from naru_proto import names
from naru_router.core.load_choice import choose_worker

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
EXPLAIN = {names.HEADER_EXPLAIN: "1"}


async def cold_workers(rig: Rig, count: int = 2, **settings: Any) -> list[ColdWorker]:
    """Workers that know the model and do not hold it, and a router. The one that is to load it comes first."""
    await rig.publish_model(on_demand=True, pools=("default",))
    workers = [ColdWorker(rig) for _ in range(count)]
    for index, worker in enumerate(workers):
        await worker.start(f"w{index}")
    await rig.start_router(**settings)
    home = _home(rig)
    return sorted(workers, key=lambda worker: worker.stub.worker_id != home)


def _home(rig: Rig) -> str:
    route_map = rig.app.fleet.route_map
    chosen = choose_worker(route_map, MODEL, route_map.workers.keys())
    assert chosen is not None
    return chosen


async def test_fifty_requests_at_once_over_two_routers_load_a_cold_model_once(rig: Rig, second: Rig) -> None:
    workers = await cold_workers(rig)
    await second.start_router()
    workers[0].may_load.clear()
    requests = []
    for index in range(50):
        path = CHAT if index % 3 else COMPLETION
        router = (rig, second)[index % 2]
        requests.append(asyncio.create_task(router.post(path, body(path, stream=index % 5 == 0))))
    # All completions, and one knock of each router for its chats.
    await workers[0].stub.until(lambda: len(workers[0].stub.running) == 17 + 2)
    workers[0].may_load.set()
    answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200] * 50
    assert [worker.num_loads for worker in workers] == [1, 0]
    assert workers[0].num_knocks == 2
    assert len(workers[0].stub.requests) == 50 + 2
    assert rig.app.dispatcher.waiting.num_waiting(MODEL) == 0


@BOTH
async def test_a_worker_that_does_not_know_the_model_passes_the_request_on(rig: Rig, path: str) -> None:
    first, other = await cold_workers(rig)
    first.knows = False
    for _ in range(2):
        assert (await rig.post(path, body(path))).status_code == 200
        await rig.until(lambda: rig.app.fleet.is_ready(other.stub.worker_id, MODEL))
    assert (len(first.stub.moves), first.stub.requests) == (1, [])
    assert (len(other.stub.moves), other.num_loads) == (1, 1)


@BOTH
async def test_a_model_that_no_worker_knows_yet_is_waited_for(rig: Rig, path: str) -> None:
    workers = await cold_workers(rig, model_wait_s=60.0)
    for worker in workers:
        worker.knows = False
    requests = [asyncio.create_task(rig.post(path, body(path))) for _ in range(3)]
    for worker in workers:
        await worker.stub.until(lambda worker=worker: bool(worker.stub.moves))  # type: ignore[misc]
    workers[1].knows = True
    await workers[1].show(num_known=1)
    assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200] * 3
    assert [worker.num_loads for worker in workers] == [0, 1]


@BOTH
async def test_the_wait_for_a_model_that_no_worker_knows_has_an_end(rig: Rig, path: str) -> None:
    workers = await cold_workers(rig, model_wait_s=1.0)
    for worker in workers:
        worker.knows = False
    response = await rig.post(path, body(path))
    assert response.status_code == 503 and "no worker knows" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "2"
    assert [(len(worker.stub.moves), worker.stub.requests) for worker in workers] == [(1, [])] * 2


@BOTH
async def test_a_held_request_that_the_worker_rejects_says_why_and_when_to_come_back(rig: Rig, path: str) -> None:
    (worker,) = await cold_workers(rig, count=1)
    worker.may_load.clear()
    worker.refusal = "service_unavailable"
    request = asyncio.create_task(rig.post(path, body(path)))
    await worker.stub.until(lambda: worker.num_loads == 1)
    await worker.show("loading", eta_s=6.1)
    await rig.until(lambda: rig.app.fleet.route_map.eta_s(MODEL) > 0)
    worker.may_load.set()
    response = await request
    assert response.status_code == 503 and "no room for it" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "7"


@BOTH
async def test_a_request_is_held_no_longer_than_a_request_may_wait(rig: Rig, path: str) -> None:
    (worker,) = await cold_workers(rig, count=1, model_wait_s=0.3)
    worker.may_load.clear()
    response = await rig.post(path, body(path))
    assert response.status_code == 503 and "still loading" in response.json()["error"]["message"]
    await worker.stub.until(lambda: len(worker.stub.cancelled) == 1)
    worker.may_load.set()


async def test_a_held_request_whose_model_got_ready_in_time_is_not_ended(rig: Rig) -> None:
    (worker,) = await cold_workers(rig, count=1, model_wait_s=2.0)
    worker.may_load.clear()
    request = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await worker.stub.until(lambda: worker.num_loads == 1)
    await worker.show("ready")
    await rig.until(lambda: rig.app.fleet.is_ready("w0", MODEL))
    await asyncio.wait({request}, timeout=2.2)  # past the time it may wait
    assert not request.done()
    worker.may_load.set()
    assert (await request).status_code == 200


@pytest.mark.parametrize("code", ["model_load_failed", "service_unavailable"])
async def test_all_chats_that_wait_for_a_load_hear_why_it_failed(rig: Rig, code: str) -> None:
    (worker,) = await cold_workers(rig, count=1)
    worker.may_load.clear()
    worker.refusal = code
    requests = [asyncio.create_task(rig.post(CHAT, body(CHAT))) for _ in range(5)]
    await worker.stub.until(lambda: worker.num_loads == 1)
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 5)
    worker.may_load.set()
    for answer in await asyncio.gather(*requests):
        assert answer.json()["error"]["code"] == code and "no room for it" in answer.json()["error"]["message"]
    assert len(worker.stub.requests) == worker.num_knocks == 1


@BOTH
async def test_requests_beyond_the_waiting_ones_are_429(rig: Rig, path: str) -> None:
    (worker,) = await cold_workers(rig, count=1, max_waiting_per_model=2)
    worker.may_load.clear()
    waiting = [asyncio.create_task(rig.post(path, body(path))) for _ in range(2)]
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 2)
    response = await rig.post(path, body(path))
    assert response.status_code == 429 and response.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(response.headers["retry-after"]) >= 1
    worker.may_load.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert rig.app.dispatcher.waiting.num_waiting(MODEL) == 0
    assert (await rig.post(path, body(path))).status_code == 200


@BOTH
async def test_clients_that_leave_while_they_wait_leave_nothing(rig: Rig, path: str) -> None:
    (worker,) = await cold_workers(rig, count=1)
    worker.may_load.clear()
    requests = [asyncio.create_task(rig.post(path, body(path))) for _ in range(3)]
    num_sent = 1 if path == CHAT else 3
    await worker.stub.until(lambda: len(worker.stub.running) == num_sent)
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 3)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await worker.stub.until(lambda: len(worker.stub.cancelled) == num_sent)
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 0)
    worker.may_load.set()
    assert (await rig.post(path, body(path))).status_code == 200


async def test_one_chat_that_leaves_takes_no_other_with_it(rig: Rig) -> None:
    (worker,) = await cold_workers(rig, count=1)
    worker.may_load.clear()
    leaving, staying = (asyncio.create_task(rig.post(CHAT, body(CHAT))) for _ in range(2))
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 2)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 1)
    worker.may_load.set()
    assert (await staying).status_code == 200
    assert worker.num_knocks == 1


async def test_a_chat_for_an_evicted_model_is_rendered_at_once_and_held_by_its_worker(rig: Rig) -> None:
    (worker,) = await cold_workers(rig, count=1)
    await worker.show("ready")
    await rig.until(lambda: rig.app.fleet.is_ready("w0", MODEL))
    await worker.show("")
    await rig.until(lambda: not rig.app.fleet.is_ready("w0", MODEL))
    response = await rig.client.post(CHAT, json=body(CHAT), headers=EXPLAIN)
    assert response.status_code == 200
    assert response.headers["x-naru-route"].startswith("w0; asked to load it; ")
    assert worker.num_knocks == 0 and len(worker.stub.requests) == 1


async def test_a_copy_that_is_loading_gets_the_request_before_any_that_would_have_to(rig: Rig) -> None:
    home, other = await cold_workers(rig)
    await home.show("host")
    await other.show("loading")
    await rig.until(lambda: all(w.models for w in rig.app.fleet.route_map.workers.values()))
    response = await rig.client.post(COMPLETION, json=body(COMPLETION), headers=EXPLAIN)
    route = response.headers["x-naru-route"]
    assert route.startswith(f"{other.stub.worker_id}; held there until it is loaded; ")


async def test_a_copy_of_an_older_generation_on_its_way_is_not_asked(rig: Rig) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(script=say("Hel", "lo"), state="loading", generation=0)
    await rig.start_router()
    request = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 1)
    assert worker.requests == []
    await rig.publish_worker("w0", state="loading", generation=1)
    assert (await request).status_code == 200


async def test_a_busy_copy_has_no_second_one_loaded(rig: Rig) -> None:
    await rig.publish_model()
    await rig.start_worker("w0", fail("rate_limit_exceeded", "full of work", retryable=True))
    idle = await rig.start_worker("w1", models=())
    await rig.start_router()
    response = await rig.post(COMPLETION, body(COMPLETION))
    assert response.status_code == 429 and "full of work" in response.json()["error"]["message"]
    assert idle.requests == []


async def test_requests_that_wait_end_when_the_router_does(rig: Rig) -> None:
    workers = await cold_workers(rig, count=1, drain_timeout_s=0.1, model_wait_s=60.0)
    workers[0].may_load.clear()
    requests = [asyncio.create_task(rig.post(path, body(path))) for path in (CHAT, COMPLETION)]
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 2)
    await rig.app.drain()
    answers: list[httpx.Response] = await asyncio.gather(*requests)
    assert all(a.status_code == 503 and "shutting down" in a.json()["error"]["message"] for a in answers)
    workers[0].may_load.set()


async def test_a_model_taken_from_the_registry_while_requests_wait_ends_them(rig: Rig) -> None:
    workers = await cold_workers(rig, count=1, model_wait_s=60.0)
    workers[0].knows = False
    request = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await workers[0].stub.until(lambda: bool(workers[0].stub.moves))
    await rig.board.hdel(names.KEY_MODELS, MODEL)
    await rig.board.publish(names.CHANNEL_CHANGES, "models")
    response = await request
    assert response.status_code == 503 and "no worker holds" in response.json()["error"]["message"]


async def test_a_held_request_streams_from_the_first_byte_on(rig: Rig) -> None:
    (worker,) = await cold_workers(rig, count=1)
    *chunks, end = await rig.stream(COMPLETION, body(COMPLETION))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello" and end == "[DONE]"
    assert worker.num_loads == 1


async def test_the_worker_that_hangs_after_its_lease_says_ready_is_no_longer_waiting(rig: Rig) -> None:
    await rig.publish_model()
    worker = await rig.start_worker(script=hang("tok"), state="loading")
    await rig.start_router()
    request = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await worker.until(lambda: bool(worker.running))
    await rig.until(lambda: rig.app.dispatcher.waiting.num_waiting(MODEL) == 0)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
