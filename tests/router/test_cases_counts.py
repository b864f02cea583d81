"""Counts of requests in flight: exact while they run, zero when none does, whatever became of them."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator

import httpx
from router_rig import CHAT, COMPLETION, MODEL, Rig, body, poll, simple
from stub_worker import Script, StubWorker, fail, hang, say
from telling_worker import TellingWorker, start_telling

from naru_proto.v1 import worker_pb2 as wire

NUM_REQUESTS = 500


async def gauges(rig: Rig) -> dict[str, float]:
    """What the router says of requests that are open, by series."""
    text = (await rig.client.get("/metrics")).text
    found = re.findall(r"^(naru_router_(?:requests_|others_)?(?:in_flight|waiting)\S*) (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def what_is_kept(rig: Rig) -> dict[str, int]:
    """Everything that a router keeps for a request while it is open."""
    fleet, dispatcher = rig.app.fleet, rig.app.dispatcher
    links = [*fleet._links.values(), *fleet._retired.values()]
    return {
        "inside": rig.app.gate.num_inside,
        "tickets": sum(link.num_in_flight for link in links),
        "by model": sum(link._num_open.total() for link in links),
        "sent": sum(len(worker.sent) + sum(worker.sent_tokens.values()) for worker in fleet.news._workers.values()),
        "pending keys": sum(len(entries) for entries in fleet.pending._alike.values()),
        "held": sum(held.total() for held in fleet._held.values()),
        "waiting": dispatcher.waiting.num_waiting(MODEL),
        "meters": sum(meter.num_waiting + meter._waiting_work for meter in fleet.health._meters.values()),
    }


async def until_idle(rig: Rig) -> None:
    await rig.until(lambda: not any(what_is_kept(rig).values()))
    assert not any((await gauges(rig)).values())


def slow(rng: random.Random) -> Script:
    """Answers in a few pieces with pauses, or refuses, or breaks."""

    async def script(request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await asyncio.sleep(rng.random() * 0.02)
        refusals = (("rate_limit_exceeded", True), ("internal_error", True), ("invalid_request_error", False))
        code, retryable = rng.choice(refusals)
        answer = fail(code, retryable=retryable) if rng.random() < 0.15 else say("a", "b", "c")
        async for delta in answer(request):
            yield delta
            await asyncio.sleep(rng.random() * 0.02)

    return script


async def test_nothing_is_left_of_requests_that_ended_anyhow(rig: Rig) -> None:
    """Clients leave at any moment, workers refuse, fail, break off, and one is killed."""
    rng = random.Random(7)
    await rig.publish_model()
    workers = [await start_telling(rig, f"w{i}", slow(rng), rate=1000.0 * (i % 2)) for i in range(3)]
    await rig.start_router()
    statuses: Counter[int] = Counter()
    most: Counter[str] = Counter()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        path = rng.choice((CHAT, COMPLETION))
        sent = body(path, stream=rng.random() < 0.5)
        if path == COMPLETION:
            sent["prompt"] = f"{number % 7}" * rng.randrange(1, 400)
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.01, 0.03, 20.0, 20.0))):
                statuses[(await client.post(path, json=sent)).status_code] += 1
        except TimeoutError:
            statuses[499] += 1

    async def work(client: httpx.AsyncClient, worker_number: int) -> None:
        for number in range(worker_number, NUM_REQUESTS, 25):
            await ask(client, number)
            for name, count in what_is_kept(rig).items():
                most[name] = max(most[name], count)
                assert count >= 0, name
            if number == NUM_REQUESTS // 2:
                await workers[2].kill()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=rig.client.base_url, timeout=20, limits=limits) as client:
        await asyncio.gather(*(work(client, number) for number in range(25)))
    await until_idle(rig)
    assert statuses.total() == NUM_REQUESTS and statuses[200] > 100 and statuses[499] > 100
    assert most["tickets"] > 5 and most["sent"] > 5 and most["pending keys"] > 0 and most["meters"] > 0
    for worker in workers[:2]:
        await worker.until(lambda worker=worker: not worker.running)  # type: ignore[misc]


async def test_a_successor_of_the_same_name_is_counted_from_zero(rig: Rig) -> None:
    """Its forerunner's requests end while it serves already: by their end, by their clients, by its death."""
    old = await simple(rig, hang("tok"))
    streams = [asyncio.create_task(rig.post(COMPLETION, body(COMPLETION, stream=True))) for _ in range(10)]
    await old.until(lambda: len(old.running) == 10)
    new = StubWorker("w0", hang("tok"))
    await new.start()
    rig.workers = {"w0": new, "old": old}
    await rig.publish_worker("w0", epoch="e2")
    await rig.until(lambda: rig.app.fleet.link("w0")[0].address.endswith(str(new.port)) and rig.app.fleet.num_up() == 1)
    (view,) = rig.app.fleet.views(MODEL, rig.app.fleet.ready(MODEL))
    assert (view.num_in_flight, view.num_in_flight_all) == (0, 0)
    later = [asyncio.create_task(rig.post(COMPLETION, body(COMPLETION, stream=True))) for _ in range(3)]
    await new.until(lambda: len(new.running) == 3)
    series = 'naru_router_requests_in_flight{worker="w0"}'
    assert (await gauges(rig))[series] == 13
    for stream in streams[:4]:
        stream.cancel()
    await old.until(lambda: len(old.running) == 6)
    await rig.until(lambda: rig.app.gate.num_inside == 9)
    assert (await gauges(rig))[series] == 9
    await old.kill()
    # Its streams had begun without token ids to go on from: they end, and the new worker gets none of them.
    await asyncio.gather(*streams, return_exceptions=True)
    assert len(new.requests) == 3
    (view,) = rig.app.fleet.views(MODEL, rig.app.fleet.ready(MODEL))
    assert view.num_in_flight == 3 and (await gauges(rig))[series] == 3

    async def is_told_up() -> bool:
        return 'naru_router_worker_up{worker="w0"} 1.0' in (await rig.client.get("/metrics")).text

    await rig.until(lambda: not rig.app.fleet._retired)
    assert await is_told_up(), "the end of the old stream says nothing of the new one"
    for stream in later:
        stream.cancel()
    await asyncio.gather(*later, return_exceptions=True)
    await until_idle(rig)


async def test_news_of_a_forerunner_are_not_taken_for_its_successors(rig: Rig) -> None:
    await rig.publish_model()
    old = await start_telling(rig, "w0", hang("tok"), rate=10.0)
    await rig.start_router()
    stream = asyncio.create_task(rig.post(COMPLETION, body(COMPLETION, prompt="x" * 500, stream=True)))
    await old.until(lambda: len(old.cache) > 0)
    await rig.until(lambda: rig.app.fleet.news.index.num_keys == len(old.cache))
    new = TellingWorker("w0", say("a"), prefill_tokens_per_s=5000.0, epoch="e2")
    new.cache = dict.fromkeys([b"k" * 16])
    await new.start()
    rig.workers = {"w0": new, "old": old}
    await rig.publish_worker("w0", epoch="e2")
    news = rig.app.fleet.news
    await rig.until(lambda: news.epoch("w0") == "e2")
    assert (news.index.num_keys, news.load("w0", MODEL).prefill_tokens_per_s) == (1, 5000.0)
    for told in old._streams:
        old._keep((b"z" * 16,))
        told.wake()

    async def is_sent() -> bool:
        return all(told.empty() and not told.updates for told in old._streams)

    await poll(is_sent)
    assert (await rig.post(COMPLETION, body(COMPLETION, prompt="y"))).status_code == 200  # a round trip later
    assert (news.epoch("w0"), news.load("w0", MODEL).prefill_tokens_per_s) == ("e2", 5000.0)
    assert news.matches(MODEL, [b"k" * 16]) == {"w0": 1} and news.matches(MODEL, [b"z" * 16]) == {}
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await until_idle(rig)
