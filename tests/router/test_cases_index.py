"""What a router believes of workers' caches: what they hold or nothing, whatever gets lost between the two."""

from __future__ import annotations

import gc
import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from router_rig import CHAT, COMPLETION, MODEL, Rig, body
from stub_worker import say
from telling_worker import TellingWorker, start_telling

from naru_proto.route_keys import pack_keys
from naru_proto.v1 import worker_pb2 as wire
from naru_router.adapters.news import News

KEYS = [bytes([number]) * 16 for number in range(40)]


class Cache:
    """A worker's cache and what it tells of it, as one stream carries it."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.num_updates = 0

    def frame(self, added: set[bytes], removed: set[bytes], *, is_snapshot: bool = False) -> wire.WorkerFrame:
        self.held = (self.held - removed) | added
        self.num_updates += 1
        update = wire.RouteKeyUpdate(
            model=MODEL,
            epoch=1,
            is_snapshot=is_snapshot,
            added=pack_keys(tuple(sorted(self.held if is_snapshot else added))),
            removed=pack_keys(tuple(sorted(removed))),
            number=self.num_updates,
        )
        return wire.WorkerFrame(epoch="e", route_keys=[update])


def believed(news: News) -> set[bytes]:
    return {key for key in KEYS if news.matches(MODEL, [key])}


SETS = st.sets(st.sampled_from(KEYS[:8]))
FAULTS = st.sampled_from(["", "", "", "", "dropped", "twice", "late", "stream lost"])


@settings(max_examples=150)
@given(st.lists(st.tuples(FAULTS, SETS, SETS), max_size=15))
def test_updates_that_are_lost_doubled_or_late_leave_the_truth_or_nothing(
    steps: list[tuple[str, set[bytes], set[bytes]]],
) -> None:
    news, cache, late = News(), Cache(), deque[wire.WorkerFrame]()
    news.take("w", cache.frame(set(), set(), is_snapshot=True))
    has_fault = False
    for fault, added, removed in steps:
        if fault == "stream lost":
            news.lost("w")
            late.clear()
            cache.num_updates, has_fault = 0, False
            news.take("w", cache.frame(added, removed, is_snapshot=True))
        else:
            frame = cache.frame(added, removed - added)
            if fault == "late":
                late.append(frame)
            elif fault != "dropped":
                news.take("w", frame)
            if fault == "twice":
                news.take("w", frame)
            if late and fault != "late":
                news.take("w", late.popleft())
            has_fault = has_fault or fault in ("dropped", "late")
        # Until the next update comes, nobody can know that one is missing.
        if fault not in ("dropped", "late"):
            assert believed(news) == (set() if has_fault else cache.held)
        news.index.check()


def test_a_random_tenth_of_updates_gone_and_another_doubled_ends_in_the_truth_on_the_next_stream() -> None:
    rng = random.Random(5)
    news, cache = News(), Cache()
    news.take("w", cache.frame(set(), set(), is_snapshot=True))
    frames = [cache.frame(set(rng.sample(KEYS, 5)), set(rng.sample(KEYS, 5))) for _ in range(300)]
    sent = [frame for frame in frames for _ in range(rng.choices([1, 0, 2], [8, 1, 1])[0])]
    for index in range(0, len(sent) - 1, 17):
        sent[index], sent[index + 1] = sent[index + 1], sent[index]
    for frame in sent:
        news.take("w", frame)
    assert believed(news) == set() and news.num_damaged > 0
    news.lost("w")
    news.take("w", cache.frame(set(), set(), is_snapshot=True))
    assert believed(news) == cache.held


async def told(rig: Rig, worker: TellingWorker) -> None:
    """Returns when the router believes what the worker holds."""
    news = rig.app.fleet.news
    keys = list(worker.cache)
    await rig.until(lambda: news.index.num_worker_keys(worker.worker_id) == len(worker.cache))
    assert all(news.matches(MODEL, [key]).get(worker.worker_id) for key in keys)


async def test_a_worker_that_starts_anew_at_its_address_has_nothing_left_of_before(rig: Rig) -> None:
    await rig.publish_model()
    worker = await start_telling(rig, "w0", say("a"), rate=1000.0)
    await rig.start_router()
    prompt = "what it held before " * 40
    assert (await rig.post(COMPLETION, body(COMPLETION, prompt=prompt))).status_code == 200
    await told(rig, worker)
    before = list(worker.cache)
    await worker.kill()
    await rig.until(lambda: rig.app.fleet.num_up() == 0)
    news = rig.app.fleet.news
    assert (news.index.num_keys, news.matches(MODEL, before), news.epoch("w0")) == (0, {}, "")
    worker.cache.clear()
    worker.epoch = "e2"
    await worker.start(worker.port)
    await rig.publish_worker("w0", epoch="e2")
    await rig.until(lambda: news.epoch("w0") == "e2")
    assert news.matches(MODEL, before) == {} and news.num_damaged == 0
    reply = await rig.post(COMPLETION, body(COMPLETION, prompt=prompt))
    assert reply.status_code == 200 and "0 of" in reply.headers["x-naru-route"]
    await told(rig, worker)


async def test_a_router_that_starts_anew_knows_what_workers_hold(rig: Rig) -> None:
    await rig.publish_model()
    workers = [await start_telling(rig, f"w{i}", say("a"), rate=1000.0) for i in range(2)]
    await rig.start_router()
    for number in range(10):
        await rig.post(COMPLETION, body(COMPLETION, prompt=f"{number} " * 200))
    held = {worker.worker_id: list(worker.cache) for worker in workers}
    await rig.client.aclose()
    await rig.app.stop()
    await rig.start_router()
    for worker in workers:
        await told(rig, worker)
        assert list(worker.cache) == held[worker.worker_id] and worker.num_streams == 1


async def test_prompts_that_never_come_again_leave_nothing_in_the_router(rig: Rig) -> None:
    await rig.publish_model()
    worker = await start_telling(rig, "w0", say("a"), rate=1000.0)
    await rig.start_router(num_traces=8)
    index = rig.app.fleet.news.index
    index._max_keys = index._max_worker_keys = 500
    number = 0

    async def ask(count: int) -> int:
        """Asks so much that is new; all objects that are there afterwards."""
        nonlocal number
        for number in range(number, number + count):  # noqa: B020
            path = (CHAT, COMPLETION)[number % 2]
            text = f"{number} is a prompt that nobody sends twice " * 8
            sent = body(path, user=f"user {number}", stream=number % 3 == 0)
            if path == COMPLETION:
                sent["prompt"] = text
            else:
                sent["messages"] = [{"role": "user", "content": text}]
            headers = {"x-session-id": f"session {number}", "x-request-id": f"request-{number}"}
            assert (await rig.client.post(path, json=sent, headers=headers)).status_code == 200
        worker.requests.clear()
        worker.hits.clear()
        number += 1
        gc.collect()
        return len(gc.get_objects())

    await ask(100)
    before = await ask(50)
    after = await ask(300)
    assert index.num_keys <= 500 and len(index._tables[MODEL].masks) <= 520 and index.num_dropped > 500
    assert after - before < 300, "less than one object is kept for each request"
