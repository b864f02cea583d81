"""A request's life in a router: time limits, refusals by priority, retries within their budget, workers on trial."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, simple
from stub_worker import StubWorker, fail, hang, say
from telling_worker import start_telling

from naru_proto import names
from naru_proto.errors import NaruError, Unavailable
from naru_proto.v1 import inference_pb2, inference_pb2_grpc
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters import dispatcher as dispatcher_module
from naru_router.adapters.course import Job, SilentConsumer
from naru_router.adapters.jobs import JobMaker
from naru_router.adapters.metrics import Metrics
from naru_router.core.breaker import DEFAULTS
from naru_router.core.overload import ShedLimits
from naru_router.core.token_sizes import TokenSizes

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETION])


async def metric(rig: Rig, line_start: str) -> float:
    text = (await rig.client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(line_start))


async def workers_with(rig: Rig, count: int, code: str, **fields: Any) -> list[StubWorker]:
    """A running router with so many workers that all fail with a code."""
    await rig.publish_model(**fields)
    workers = [await rig.start_worker(f"w{i}", fail(code, "not now", retryable=True)) for i in range(count)]
    await rig.start_router()
    return workers


def is_nothing_left(rig: Rig) -> bool:
    """Whether no request is counted anywhere."""
    fleet = rig.app.fleet
    links = [*fleet._links.values(), *fleet._retired.values()]
    is_counted = any(link.num_in_flight for link in links) or any(w.sent for w in fleet.news._workers.values())
    meters = any(meter.num_waiting for meter in fleet.health._meters.values())
    return not (
        is_counted
        or meters
        or len(fleet.queues)
        or fleet.pending._alike
        or fleet._held
        or rig.app.dispatcher.waiting._counts
    )


# --- time limits ----------------------------------------------------------------------------------------------------


@BOTH
async def test_a_deadline_that_passes_on_a_worker_is_504_and_ends_the_work(
    rig: Rig, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "DEADLINE_GRACE_S", 0.01)
    worker = await simple(rig, hang())
    response = await rig.client.post(path, json=body(path), headers={names.HEADER_TIMEOUT: "0.2"})
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    assert 0.0 < worker.requests[0].timeout_s <= 0.2
    await worker.until(lambda: not worker.running)
    assert is_nothing_left(rig)


@BOTH
@pytest.mark.parametrize("state", ["loading", "absent"])
async def test_a_deadline_that_passes_while_the_model_comes_up_is_504(rig: Rig, path: str, state: str) -> None:
    """In the router, on the worker, and for a chat whose template is not known yet."""
    await rig.publish_model()
    models = (MODEL,) if state == "loading" else ()
    await rig.start_worker(script=hang(), models=models, state=state)
    await rig.start_router()
    began_s = time.monotonic()
    response = await rig.client.post(path, json=body(path), headers={names.HEADER_TIMEOUT: "0.2"})
    assert response.status_code == 504 and "retry-after" not in response.headers
    assert time.monotonic() - began_s < 4.0, "the model's own limit is 5 s"
    await rig.workers["w0"].until(lambda: not rig.workers["w0"].running)
    await rig.until(lambda: is_nothing_left(rig))


async def test_a_deadline_of_a_call_is_told_to_the_worker_and_back_over_grpc(rig: Rig) -> None:
    worker = await simple(rig, fail("deadline_exceeded", "its time is over"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.app.grpc_port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.InferenceGenerateRequest(model=MODEL, prompt="hi")
        for timeout, metadata in ((30.0, ()), (None, ((names.HEADER_TIMEOUT, "20"),))):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                async for _ in stub.Generate(request, timeout=timeout, metadata=metadata):
                    raise AssertionError("it says something")
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC rounds a deadline up on its way.
    assert [25.0 < worker.requests[0].timeout_s <= 31.0, 15.0 < worker.requests[1].timeout_s <= 20.0] == [True, True]


async def test_a_request_without_a_deadline_tells_none(rig: Rig) -> None:
    worker = await simple(rig)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 200
    assert worker.requests[0].timeout_s == 0.0


# --- refusals -------------------------------------------------------------------------------------------------------


async def test_a_long_queue_sheds_by_priority_and_says_when_to_come_again(rig: Rig) -> None:
    await rig.publish_model()
    gate = asyncio.Event()

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        if request.text.startswith("long"):
            await gate.wait()
        async for delta in say("a")(request):
            yield delta

    worker = await start_telling(rig, "w0", script, rate=100.0)
    await rig.start_router(max_queue_s=120.0)
    news = rig.app.fleet.news
    await rig.until(lambda: news.load("w0", MODEL).prefill_tokens_per_s > 0)
    first = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION, prompt="long " * 8000)))  # 10 000 tokens: 100 s
    await worker.until(lambda: len(worker.running) == 1)
    await rig.until(lambda: news.load("w0", MODEL).waiting_tokens >= 9000)
    # Nobody in particular may ask for no sooner turn than 0.
    answers = {
        priority: await rig.client.post(
            COMPLETION, json=body(COMPLETION), headers={names.HEADER_PRIORITY: str(priority)}
        )
        for priority in (0, 4, 8)
    }
    assert {priority: response.status_code for priority, response in answers.items()} == {0: 200, 4: 429, 8: 429}
    for priority in (4, 8):  # the queue of 100 s has to shrink to what a request of that priority may wait
        limit_s = 120.0 / ShedLimits().priority_ratio ** priority
        assert int(answers[priority].headers["retry-after"]) == pytest.approx(100.0 - limit_s, abs=4)
    assert await metric(rig, f'naru_router_requests_refused_total{{model="{MODEL}",reason="overload"}}') == 2
    assert len(worker.requests) == 2
    gate.set()
    assert (await first).status_code == 200
    assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200


async def test_a_busy_worker_is_passed_on_once_and_then_believed(rig: Rig) -> None:
    workers = await workers_with(rig, 3, "rate_limit_exceeded")
    response = await rig.post(CHAT, body(CHAT))
    assert response.status_code == 429 and response.headers["retry-after"]
    assert sum(len(worker.requests) for worker in workers) == 2
    # Two were busy: for a while nobody is asked after a first refusal.
    assert (await rig.post(CHAT, body(CHAT))).status_code == 429
    assert sum(len(worker.requests) for worker in workers) == 3


# --- retries --------------------------------------------------------------------------------------------------------


async def test_retries_of_a_failing_fleet_stay_within_their_budget(rig: Rig) -> None:
    workers = await workers_with(rig, 3, "internal_error", max_retries=5)
    replies = await asyncio.gather(*(rig.post(COMPLETION, body(COMPLETION, prompt=f"{i}")) for i in range(40)))
    assert {reply.status_code for reply in replies} == {500}
    num_tries = sum(len(worker.requests) for worker in workers)
    # A tenth of the requests and ten more.
    assert 40 < num_tries <= 40 + 4 + 10
    assert await metric(rig, "naru_router_retries_total{") == num_tries - 40


async def test_a_model_may_have_no_retries(rig: Rig) -> None:
    workers = await workers_with(rig, 2, "internal_error", max_retries=0)
    assert (await rig.post(CHAT, body(CHAT))).status_code == 500
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_a_worker_that_failed_is_tried_by_one_request_after_a_pause(rig: Rig) -> None:
    await rig.publish_model()
    bad, good = [await rig.start_worker(f"w{i}") for i in range(2)]
    await rig.start_router()
    health = rig.app.fleet.health
    now_s = health.clock()
    health.clock = lambda: now_s
    if (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].startswith("w1"):
        bad, good = good, bad
    bad.script = fail("internal_error", "the engine broke", retryable=True)
    bad.requests.clear()
    for _ in range(DEFAULTS.max_faults + 5):
        assert (await rig.post(COMPLETION, body(COMPLETION))).status_code == 200
    assert len(bad.requests) == DEFAULTS.max_faults
    now_s += DEFAULTS.min_pause_s + 0.01
    release = asyncio.Event()

    async def slowly(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await release.wait()
        async for delta in say("Hel", "lo")(request):
            yield delta

    bad.script = slowly
    probe = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION)))
    await bad.until(lambda: len(bad.running) == 1)
    for _ in range(5):  # no second one tries it meanwhile
        assert (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].startswith(good.worker_id)
    release.set()
    assert "half open" in (await probe).headers["x-naru-route"]
    assert (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].startswith(bad.worker_id)


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_requests_that_end_in_any_way_leave_nothing_behind(rig: Rig) -> None:
    """Served, refused, cancelled while it runs, cancelled while it is held, ended by its client's slowness."""
    worker = await simple(rig, hang("a"))
    jobs = rig.app.dispatcher
    job = _job(rig, "x" * 200)

    class Slow(SilentConsumer):
        def feed(self, deltas: Any) -> None:
            raise Unavailable("the client reads too slowly")

    with pytest.raises(Unavailable, match="too slowly"):
        await jobs.run(job, Slow())
    worker.script = fail("invalid_request_error", "no")
    with pytest.raises(NaruError, match="no"):
        await jobs.run(job, SilentConsumer())
    worker.script = hang()
    running = asyncio.create_task(jobs.run(job, SilentConsumer()))
    await worker.until(lambda: len(worker.running) == 1)
    assert not is_nothing_left(rig)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await rig.publish_worker("w0", state="loading")
    await rig.until(lambda: not rig.app.fleet.ready(MODEL))
    held = asyncio.create_task(jobs.run(job, SilentConsumer()))
    await worker.until(lambda: len(worker.running) == 1)
    assert jobs.waiting.num_waiting(MODEL) == 1
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    await worker.until(lambda: not worker.running)
    assert is_nothing_left(rig)


async def test_a_request_that_is_placed_while_the_router_ends_is_sent_nowhere(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await simple(rig, hang())
    dispatcher = rig.app.dispatcher
    choose = dispatcher._chooser.choose

    async def late(*args: Any, **kwargs: Any) -> Any:
        found = await choose(*args, **kwargs)
        dispatcher.shut_down()
        return found

    monkeypatch.setattr(dispatcher._chooser, "choose", late)
    with pytest.raises(Unavailable, match="shutting down"):
        await dispatcher.run(_job(rig), SilentConsumer())
    assert worker.requests == [] and is_nothing_left(rig)


# --- strategies -----------------------------------------------------------------------------------------------------


async def test_the_least_loaded_worker_is_the_one_with_the_fewest_requests_of_all_routers(rig: Rig) -> None:
    await rig.publish_model(strategy="least_loaded")
    workers = {f"w{i}": await start_telling(rig, f"w{i}", hang("a")) for i in range(2)}
    await rig.start_router()
    other = Rig(rig.redis_url)
    other.workers = rig.workers
    await other.start_router()
    tasks = []
    try:
        for number in range(1, 7):  # in turn through both routers
            via = (rig, other)[number % 2]
            tasks.append(asyncio.create_task(via.post(COMPLETION, body(COMPLETION, prompt="same", stream=True))))
            for router in (rig, other):
                await router.until(functools.partial(_knows_of, router, number))
        assert Counter(len(worker.running) for worker in workers.values()) == Counter({3: 2})
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await other.client.aclose()
        await other.app.stop()


def _knows_of(router: Rig, number: int) -> bool:
    fleet = router.app.fleet
    return sum(view.num_in_flight for view in fleet.views(MODEL, fleet.ready(MODEL))) == number


async def test_requests_in_turn_go_to_each_worker_and_a_look_takes_no_turn(rig: Rig) -> None:
    await rig.publish_model(strategy="round_robin")
    for i in range(3):
        await rig.start_worker(f"w{i}")
    await rig.start_router()
    seen = []
    for _ in range(6):
        looked = await rig.client.post("/v1/naru/route", json={"model": MODEL, "prompt": "hi"})
        sent = (await rig.post(COMPLETION, body(COMPLETION))).headers["x-naru-route"].split(";")[0]
        assert looked.json()["attempts"][0]["worker"] == sent
        seen.append(sent)
    assert seen == ["w0", "w1", "w2"] * 2


def _job(rig: Rig, prompt: str = "hi") -> Job:
    nothing: Any = None  # a plain prompt needs neither facts nor templates
    jobs = JobMaker(rig.app.fleet, nothing, nothing, TokenSizes(), Metrics())
    return jobs.completions(MODEL, [prompt], inference_pb2.SamplingParams())[0]
