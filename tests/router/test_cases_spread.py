"""Many requests that begin alike: no worker drowns in them, and the prefix is found again when it is quiet."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
import pytest
from router_rig import COMPLETION, Rig, body, poll
from stub_worker import say
from telling_worker import TellingWorker, start_telling

from naru_proto import names
from naru_proto.v1 import worker_pb2 as wire
from naru_router.core.routing.route import SLACK_REQUESTS

NUM_WORKERS = 4
PREFIX = "".join(f"{number:>4} " for number in range(1600))
"""About 2000 tokens."""
RATES = pytest.mark.parametrize("rate", [0.0, 2000.0], ids=["unmeasured", "measured"])


class Fleet:
    """Workers that tell what they hold, and answer while their gate is open."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.workers: list[TellingWorker] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self, rate: float, *routers: Rig) -> None:
        await self._rig.publish_model()
        for number in range(NUM_WORKERS):
            self.workers.append(await start_telling(self._rig, f"w{number}", self._script, rate=rate))
        for router in routers:
            await router.start_router()
            await self.are_keys_told(router)

    async def running_at_once(
        self, routers: Sequence[Rig], prompts: Sequence[str], headers: dict[str, str] | None = None
    ) -> Counter[str]:
        """Requests by worker once all have come that were sent in one turn of the loop, to the routers in turn."""
        self.gate.clear()
        limits = httpx.Limits(max_connections=None)
        clients = [httpx.AsyncClient(base_url=it.client.base_url, timeout=60, limits=limits) for it in routers]
        sent = [
            asyncio.create_task(
                clients[i % len(clients)].post(COMPLETION, json=body(COMPLETION, prompt=prompt), headers=headers)
            )
            for i, prompt in enumerate(prompts)
        ]

        async def are_all_there() -> bool:
            return sum(len(worker.running) for worker in self.workers) == len(prompts)

        await poll(are_all_there, timeout_s=30)
        counts = Counter({worker.worker_id: len(worker.running) for worker in self.workers})
        self.gate.set()
        assert {reply.status_code for reply in await asyncio.gather(*sent)} == {200}
        for client in clients:
            await client.aclose()
        return counts

    async def are_keys_told(self, router: Rig) -> None:
        """Returns when the router's index is what the workers hold."""
        news = router.app.fleet.news

        def is_told() -> bool:
            return all(
                news.epoch(w.worker_id) and news.index.num_worker_keys(w.worker_id) == len(w.cache)
                for w in self.workers
            )

        await router.until(is_told)

    async def _script(self, request: wire.GenerateRequest) -> AsyncIterator[wire.Delta]:
        await self.gate.wait()
        async for delta in say("a", "b")(request):
            yield delta


def most_allowed(num_requests: int, num_routers: int, rate: float) -> int:
    """Of requests of one instant, by what each router knows of its own: see core.routing.route."""
    mean = num_requests / num_routers / NUM_WORKERS
    return num_routers * (math.ceil(1.25 * mean) + (SLACK_REQUESTS if rate else 0))


@pytest.mark.parametrize(("rate", "num_routers"), [(0.0, 1), (2000.0, 1), (2000.0, 2)])
async def test_a_hot_prefix_is_shared_by_workers_and_found_again_in_the_quiet(
    rig: Rig, second: Rig, rate: float, num_routers: int
) -> None:
    fleet, routers = Fleet(rig), [rig, second][:num_routers]
    await fleet.start(rate, *routers)
    assert (await rig.post(COMPLETION, body(COMPLETION, prompt=PREFIX))).status_code == 200
    (holder,) = (worker for worker in fleet.workers if worker.cache)
    for router in routers:
        await fleet.are_keys_told(router)

    num_asked = 200
    counts = await fleet.running_at_once(routers, [f"{PREFIX} question {i} {'x' * (i % 50)}" for i in range(num_asked)])
    assert max(counts.values()) <= most_allowed(num_asked, num_routers, rate), counts
    if num_routers == 1:
        assert max(counts.values()) / (num_asked / NUM_WORKERS) <= 1.5, counts
    num_copies = sum(len(worker.cache) >= len(holder.cache) / 2 for worker in fleet.workers)
    assert num_copies >= 3, "more than one worker has the prefix by now"

    for worker in fleet.workers:
        worker.hits.clear()
    talk, places, num_found, num_known, last = f"{PREFIX} of my own:", Counter[str](), 0, 0, 0
    for turn in range(25):
        reply = await routers[turn % num_routers].post(COMPLETION, body(COMPLETION, prompt=talk))
        places[reply.headers[names.HEADER_ROUTE].split(";")[0]] += 1
        (hit,) = (worker.hits.pop() for worker in fleet.workers if worker.hits)
        num_found += min(last, hit[0])
        num_known += last
        last = hit[1]
        talk += f" turn {turn}: " + "y" * 100
        for router in routers:
            await fleet.are_keys_told(router)
    assert places.most_common(1)[0][1] >= 23 and num_found / num_known > 0.9, places


@pytest.mark.parametrize(("rate", "are_different"), [(0.0, True), (2000.0, True), (2000.0, False)])
async def test_a_hundred_requests_in_one_tick_on_two_routers_spread_evenly(
    rig: Rig, second: Rig, rate: float, are_different: bool
) -> None:
    fleet = Fleet(rig)
    await fleet.start(rate, rig, second)
    prompts = [f"{number} {PREFIX}" if are_different else "hi" for number in range(100)]
    counts = await fleet.running_at_once([rig, second], prompts)
    assert all(20 <= count <= 30 for count in counts.values()) and len(counts) == NUM_WORKERS, counts


@RATES
async def test_one_long_prompt_a_hundred_times_in_one_tick_stays_within_the_bound(
    rig: Rig, second: Rig, rate: float
) -> None:
    """It is computed on few workers, which saves the others the work, and never on one alone."""
    fleet = Fleet(rig)
    await fleet.start(rate, rig, second)
    counts = await fleet.running_at_once([rig, second], [PREFIX] * 100)
    assert max(counts.values()) <= most_allowed(100, 2, rate), counts


HOSTILE: dict[str, tuple[Callable[[int], str], dict[str, str]]] = {
    "one first chunk": (lambda number: PREFIX[:64] + f"{number} " * 2000, {}),
    "one chunk less each": (lambda number: PREFIX[: len(PREFIX) - 32 * number] + f"{number}" * 100, {}),
    "one session": (lambda number: f"{number} " * 500, {names.HEADER_SESSION: "mine"}),
    "no whole chunk": (lambda number: "aaaa", {}),
}


@RATES
@pytest.mark.parametrize("shape", HOSTILE)
async def test_prompts_made_to_meet_on_one_worker_do_not_all_get_there(rig: Rig, rate: float, shape: str) -> None:
    fleet, (prompt, headers) = Fleet(rig), HOSTILE[shape]
    await fleet.start(rate, rig)
    assert (
        await rig.client.post(COMPLETION, json=body(COMPLETION, prompt=prompt(0)), headers=headers)
    ).status_code == 200
    counts = await fleet.running_at_once([rig], [prompt(number) for number in range(60)], headers)
    assert max(counts.values()) <= most_allowed(60, 1, rate), counts
    assert sum(len(entries) for entries in rig.app.fleet.pending._alike.values()) == 0
