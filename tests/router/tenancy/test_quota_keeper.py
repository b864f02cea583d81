"""Quotas over several routers on one real Redis: the sum holds, whoever asks, is lost, dies or has a wrong clock."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from naru_proto import names
from naru_proto.errors import QuotaExceeded
from naru_proto.tenants import Quotas
from naru_router.adapters.leases import connect
from naru_router.adapters.metrics import Metrics
from naru_router.adapters.tenancy import quota_keeper
from naru_router.adapters.tenancy.quota_keeper import QuotaKeeper, QuotaTicket
from naru_router.adapters.tenancy.quota_script import EXCHANGE, arguments, read_answer
from naru_router.core.tenancy.quota import Ask

if TYPE_CHECKING:
    from redis_process import RedisProcess

HUNDRED = Quotas(requests_per_minute=100)
KEY = names.key_quota("t", "requests")


class Routers:
    """Quota keepers that run."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._running: list[tuple[redis.asyncio.Redis, asyncio.Task[None]]] = []

    def start(self, number: int = 1, num_routers: int = 4) -> list[QuotaKeeper]:
        made = []
        for _ in range(number):
            client = connect(self._url)
            keeper = QuotaKeeper(client, f"r{len(self._running)}", lambda: num_routers, Metrics())
            self._running.append((client, asyncio.create_task(keeper.run())))
            made.append(keeper)
        return made

    async def close(self) -> None:
        for client, task in self._running:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.aclose()
        self._running.clear()


@pytest.fixture
async def routers(redis_process: RedisProcess) -> AsyncIterator[Routers]:
    redis_process.flush()
    made = Routers(redis_process.url)
    yield made
    await made.close()


async def tried(keeper: QuotaKeeper, quotas: Quotas, num_tokens: int = 1) -> QuotaTicket | QuotaExceeded:
    try:
        return await keeper.admit("t", quotas, num_tokens)
    except QuotaExceeded as exc:
        return exc


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def asked(**changes: int) -> Ask:
    return Ask(**{"sequence": 1, "used_total": 0, "told_total": 0, "held": 0, "want": 0, **changes})


async def exchange(
    client: redis.asyncio.Redis,
    share_id: str,
    ask: Ask,
    *,
    is_level: bool = False,
    windows: dict[str, int] | None = None,
) -> tuple[int, int, int] | None:
    """(held, used, held by others) of one exchange at a limit of 10; windows in milliseconds."""
    args = arguments(share_id, is_level, 10, ask)
    windows = {"window": 60_000, "bucket": 1000, "ttl": 6000} | (windows or {})
    args[9] = 0 if is_level else windows["window"]
    args[10], args[11] = windows["bucket"], windows["ttl"]
    reply: Any = await client.eval(EXCHANGE, 1, KEY, *args)
    answer = read_answer(reply)
    return None if answer is None else (answer.held, answer.used, answer.held_by_others)


async def comes_to(
    client: redis.asyncio.Redis,
    share_id: str,
    expected: tuple[int, int, int],
    *,
    is_level: bool = False,
    windows: dict[str, int] | None = None,
    **ask: int,
) -> None:
    """Asks until the answer is the expected one."""
    async with asyncio.timeout(10):
        number = 10
        while (
            await exchange(client, share_id, asked(sequence=number, **ask), is_level=is_level, windows=windows)
            != expected
        ):
            number += 1
            await asyncio.sleep(0.02)


async def test_of_a_thousand_requests_at_four_routers_as_many_pass_as_the_limit_says(
    routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that is busy with other tests is no outage of Redis.
    monkeypatch.setattr(quota_keeper, "EXCHANGE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(quota_keeper, "WAIT_S", 30.0)
    keepers = routers.start(4)
    found = await asyncio.gather(*(tried(keepers[i % 4], HUNDRED) for i in range(1000)))
    passed = sum(isinstance(each, QuotaTicket) for each in found)
    assert 98 <= passed <= 100
    refused = next(each for each in found if isinstance(each, QuotaExceeded))
    assert 0 < refused.retry_after_s <= 62
    assert "the tenant 't' may use 100 requests per minute and has used them" in refused.message


async def test_requests_that_come_one_by_one_at_one_of_four_routers_get_the_whole_limit(routers: Routers) -> None:
    keepers = routers.start(4)
    for keeper in keepers:
        assert isinstance(await tried(keeper, HUNDRED), QuotaTicket)
    passed = 0
    async with asyncio.timeout(20):
        while passed < 96:
            found = await tried(keepers[0], HUNDRED)
            passed += isinstance(found, QuotaTicket)
            # What the others hold ahead of use comes back within seconds.
            await asyncio.sleep(0 if isinstance(found, QuotaTicket) else 0.05)
    assert [type(await tried(keeper, HUNDRED)) for keeper in keepers] == [QuotaExceeded] * 4


async def test_requests_at_once_are_counted_over_all_routers_and_free_when_they_end(routers: Routers) -> None:
    keepers, quotas = routers.start(3), Quotas(max_in_flight=5)
    found = await asyncio.gather(*(tried(keepers[i % 3], quotas) for i in range(60)))
    tickets = [each for each in found if isinstance(each, QuotaTicket)]
    assert len(tickets) == 5
    for ticket in tickets:
        ticket.settle(0)
        ticket.settle(0)
    again: list[QuotaTicket] = []
    async with asyncio.timeout(10):
        while len(again) < 5:
            each = await tried(keepers[0], quotas)
            again += [each] if isinstance(each, QuotaTicket) else []
            await asyncio.sleep(0.02)
    assert isinstance(await tried(keepers[0], quotas), QuotaExceeded)


async def test_tokens_count_as_expected_until_a_request_ends_and_then_as_they_were(routers: Routers) -> None:
    (one, other), quotas = routers.start(2), Quotas(tokens_per_minute=1000)
    first = await one.admit("t", quotas, 900)
    assert isinstance(await tried(other, quotas, 200), QuotaExceeded)
    first.settle(100)
    found: list[object] = []
    async with asyncio.timeout(10):
        while not found or isinstance(found[-1], QuotaExceeded):
            found.append(await tried(other, quotas, 800))
            await asyncio.sleep(0.02)
    assert isinstance(found[-1], QuotaTicket)
    found[-1].settle(1500)
    assert isinstance(await tried(other, quotas, 1), QuotaExceeded)
    # One that may take more than the whole limit comes in when nothing else is used.
    assert isinstance(await one.admit("u", quotas, 10**9), QuotaTicket)


async def test_what_one_quota_refuses_takes_nothing_of_the_others(routers: Routers) -> None:
    (keeper,) = routers.start()
    quotas = Quotas(requests_per_minute=100, tokens_per_minute=10, max_in_flight=50)
    assert isinstance(await tried(keeper, quotas, 10), QuotaTicket)
    for _ in range(20):
        assert isinstance(await tried(keeper, quotas, 10), QuotaExceeded)
    shares = {what: share for what, _, share in keeper.shares("t", quotas)}
    assert shares["requests"].used_total == 1
    assert shares["requests"].reserved == 0


async def test_a_waiter_that_leaves_takes_nothing_along(routers: Routers) -> None:
    (keeper,) = routers.start()
    quotas = Quotas(max_in_flight=1)
    tasks = [asyncio.create_task(tried(keeper, quotas)) for _ in range(3)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        while not isinstance(await tried(keeper, quotas), QuotaTicket):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_without_redis_each_router_gives_out_its_part_at_once_and_tells_it_later(
    redis_process: RedisProcess, routers: Routers
) -> None:
    redis_process.stop()
    try:
        keepers = routers.start(2, num_routers=2)
        for keeper in keepers:
            found = [await tried(keeper, HUNDRED) for _ in range(60)]
            assert sum(isinstance(each, QuotaTicket) for each in found) == 50
            assert keeper.problem
    finally:
        redis_process.start()
    await until(lambda: not any(keeper.problem for keeper in keepers))
    await until(lambda: all(share.told_total == 50 for k in keepers for _, _, share in k.shares("t", HUNDRED)))
    (late,) = routers.start()
    assert isinstance(await tried(late, HUNDRED), QuotaExceeded)


async def test_a_redis_that_hangs_keeps_no_request_waiting(routers: Routers, client: redis.asyncio.Redis) -> None:
    (keeper,) = routers.start()
    assert isinstance(await tried(keeper, HUNDRED), QuotaTicket)
    pid = (await client.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = [await tried(keeper, Quotas(requests_per_minute=100, max_in_flight=50)) for _ in range(3)]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all(isinstance(each, QuotaTicket) for each in found)


async def test_a_router_that_ends_gives_back_what_it_holds_and_keys_end(
    routers: Routers, client: redis.asyncio.Redis
) -> None:
    (keeper,) = routers.start(num_routers=1)
    await asyncio.gather(*(tried(keeper, HUNDRED) for _ in range(20)))
    await routers.close()
    assert await exchange(client, "x", asked(want=10)) == (0, 20, 0)  # of 10
    assert 0 < await client.pttl(KEY) <= 200_000


async def test_a_share_is_counted_until_it_is_told_and_as_used_when_its_router_is_gone(
    client: redis.asyncio.Redis,
) -> None:
    assert await exchange(client, "a", asked(want=6), windows={"ttl": 50}) == (6, 0, 0)
    assert await exchange(client, "b", asked(want=6), windows={"ttl": 50}) == (4, 0, 6)
    await comes_to(client, "c", (0, 10, 0), want=1)
    # One that was only late: what it has used is not counted twice.
    assert await exchange(client, "a", asked(sequence=2, used_total=5)) == (0, 10, 0)
    assert await exchange(client, "a", asked(sequence=3, used_total=7, told_total=5)) == (0, 11, 0)


async def test_a_lost_answer_and_an_ask_that_comes_late_change_nothing(client: redis.asyncio.Redis) -> None:
    assert await exchange(client, "a", asked(want=3)) == (3, 0, 0)
    # The answer to this one is lost: the next one tells the same again.
    assert await exchange(client, "a", asked(sequence=2, used_total=2, held=1, want=2)) == (3, 2, 0)
    assert await exchange(client, "a", asked(sequence=4, used_total=3, held=0, want=2)) == (2, 3, 0)
    assert await exchange(client, "a", asked(sequence=3, used_total=2, held=9, want=9)) is None
    assert await exchange(client, "b", asked(want=10)) == (5, 3, 2)


async def test_a_redis_that_lost_everything_hears_only_what_it_was_not_told(client: redis.asyncio.Redis) -> None:
    assert await exchange(client, "a", asked(sequence=9, used_total=507, told_total=503, held=1)) == (1, 4, 0)


async def test_use_is_forgotten_after_a_window_and_not_before(client: redis.asyncio.Redis) -> None:
    short = {"window": 400, "bucket": 10}
    assert await exchange(client, "a", asked(used_total=10), windows=short) == (0, 10, 0)
    args = arguments("b", False, 10, asked(want=4, need=4))
    args[9], args[10] = 400, 10
    reply: Any = await client.eval(EXCHANGE, 1, KEY, *args)
    answer = read_answer(reply)
    assert answer is not None and answer.held == 0 and 0 < answer.retry_s <= 0.41
    await comes_to(client, "b", (4, 0, 0), windows=short, want=4)


async def test_damaged_entries_and_ones_from_the_future_do_no_harm(client: redis.asyncio.Redis) -> None:
    await client.set(KEY, "no hash")
    assert await exchange(client, "a", asked(want=2)) == (2, 0, 0)
    future = int(time.time()) + 10**6
    damage: dict[Any, Any] = {
        "b:x": "1",
        "b:1": "many",
        f"b:{future}": "3",
        "r:z": "1 2 3",
        "junk": "-5",
        "r:y": f"1 0 4 {future}000 0",
    }
    await client.hset(KEY, mapping=damage)
    # The future bucket counts as used now; a share that would never end ends like all others.
    assert await exchange(client, "a", asked(sequence=2, held=2, want=9)) == (3, 3, 4)
    left: set[Any] = set(await client.hkeys(KEY))
    assert not {b"b:x", b"b:1", f"b:{future}".encode(), b"r:z", b"junk"} & left


async def test_of_requests_at_once_a_dead_routers_share_is_free_again(client: redis.asyncio.Redis) -> None:
    assert await exchange(client, "a", asked(want=9), is_level=True, windows={"ttl": 50}) == (9, 0, 0)
    assert await exchange(client, "b", asked(want=9), is_level=True) == (1, 0, 9)
    await comes_to(client, "b", (10, 0, 0), is_level=True, held=1, want=9)
