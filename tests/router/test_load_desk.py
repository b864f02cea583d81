"""One load for all who wait, over routers that share nothing but a Redis: leases, tokens, refusals, outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
import redis.asyncio
from load_world import KEY, MODEL, Router, World

from naru_proto.errors import InternalError, LoadError, ModelNotFound, NaruError, StaleCommand, Unavailable
from naru_proto.registry import LeaseRecord
from naru_proto.v1 import worker_pb2
from naru_router.adapters import load_desk
from naru_router.adapters.leases import Leases

if TYPE_CHECKING:
    pass


@pytest.fixture
def world() -> World:
    return World("w0", "w1")


@pytest.fixture
async def routers(client: redis.asyncio.Redis, world: World) -> AsyncIterator[list[Router]]:
    made = [Router(world, client, name) for name in ("r0", "r1")]
    yield made
    for router in made:
        await router.desk.close()


async def until(world: World, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await world.changed(0.02)


async def lease(client: redis.asyncio.Redis) -> LeaseRecord | None:
    text = await client.get(KEY)
    return None if text is None else LeaseRecord.from_json(text)


async def lease_is(client: redis.asyncio.Redis, is_there: bool) -> None:
    async with asyncio.timeout(10):
        while (await lease(client) is not None) is not is_there:  # noqa: ASYNC110 - Redis gives no event
            await asyncio.sleep(0.01)


async def test_two_hundred_waiters_on_two_routers_have_one_worker_told_once(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    sites = await asyncio.gather(*(routers[index % 2].where() for index in range(200)))
    assert {site.worker_id for site in sites if site is not None} == {"w0"} and None not in sites
    assert world.told == ["w0"]
    held = await lease(client)
    assert held is not None and (held.worker_id, [held.token]) == ("w0", world.tokens)
    _, request = world.moves[0]
    assert (request.model, request.tier, request.for_request) == (MODEL, worker_pb2.TIER_ACTIVE, True)
    # One question of the router that took it, two of the one that reads whose it is.
    assert sorted(router.leases.num_asked for router in routers) == [1, 2]


async def test_those_who_come_while_it_loads_ask_redis_nothing(routers: list[Router], world: World) -> None:
    for router in routers:
        await router.where()
    before = [router.leases.num_asked for router in routers]
    for _ in range(20):
        for router in routers:
            site = await router.where()
            assert site is not None and site.worker_id == "w0"
    assert [router.leases.num_asked for router in routers] == before
    assert world.told == ["w0"]


async def test_the_lease_is_kept_while_the_load_lasts_and_given_back_when_it_is_done(
    routers: list[Router], world: World, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_desk, "LEASE_TTL_S", 0.3)
    monkeypatch.setattr(load_desk, "LINGER_S", 0.05)
    await routers[0].where()
    async with asyncio.timeout(10):
        for _ in range(30):
            assert await lease(client) is not None
            await world.changed(0.03)
    assert routers[0].desk.coming() == {MODEL: "w0"}
    world.show("w0", "ready")
    await lease_is(client, False)
    await until(world, lambda: not routers[0].desk.coming())


async def test_a_router_whose_map_is_late_finds_who_has_loaded_it(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    await routers[0].where()
    world.show("w0", "ready")
    world.states.clear()  # the other router has not read of it yet
    site = await routers[1].where()
    assert site is not None and site.worker_id == "w0" and world.told == ["w0"]


async def test_waiters_that_leave_harm_nobody_and_stop_no_load(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    waiting = [asyncio.create_task(routers[0].where()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert (await waiting[1]) == (await waiting[2]) is not None
    late = asyncio.create_task(routers[1].where())
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(*waiting, late, return_exceptions=True)
    assert world.told == ["w0"] and await lease(client) is not None
    world.show("w0", "failed")
    await lease_is(client, False)


async def test_the_last_waiter_that_leaves_before_the_worker_is_told_does_not_stop_it(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    only = asyncio.create_task(routers[0].where())
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    await until(world, lambda: world.told == ["w0"])
    world.show("w0", "failed")
    await lease_is(client, False)


@pytest.mark.parametrize(
    "refusal", [Unavailable("it drains"), LoadError("it can never fit"), ModelNotFound("not known here")]
)
async def test_a_worker_that_refuses_is_followed_by_another_under_a_newer_token(
    routers: list[Router], world: World, refusal: NaruError
) -> None:
    world.refusals["w0"] = [refusal]
    first = await routers[0].where()
    # The other one may have read the lease just before; a request of its that was refused then asks again.
    second = await routers[1].where(frozenset({"w0"}))
    assert first is not None and second is not None and first.worker_id == second.worker_id == "w1"
    assert world.told == ["w0", "w1"] and world.tokens[0] < world.tokens[1]
    assert world.unknown == ([("w0", MODEL)] if isinstance(refusal, ModelNotFound) else [])


async def test_a_worker_that_dies_while_it_loads_is_followed_by_another_under_a_newer_token(
    routers: list[Router], world: World
) -> None:
    for router in routers:
        await router.where()
    world.lose("w0")
    sites = await asyncio.gather(*(router.where(frozenset({"w0"})) for router in routers))
    assert [site.worker_id for site in sites if site is not None] == ["w1", "w1"]
    assert world.told == ["w0", "w1"] and world.tokens[0] < world.tokens[1]


async def test_a_load_that_failed_a_request_is_not_shown_to_it_again(routers: list[Router], world: World) -> None:
    await routers[0].where()
    site = await routers[0].where(frozenset({"w0"}))
    assert site is not None and site.worker_id == "w1" and world.tokens[0] < world.tokens[1]
    site = await routers[0].where()
    assert site is not None and site.worker_id == "w1"


async def test_a_worker_that_has_seen_a_newer_token_is_told_again_under_a_newer_one(
    routers: list[Router], world: World
) -> None:
    world.refusals["w0"] = [StaleCommand("an older token")]
    site = await routers[0].where()
    assert site is not None and site.worker_id == "w0"
    assert world.told == ["w0", "w0"] and world.tokens[0] < world.tokens[1]


async def test_a_worker_that_calls_every_token_old_is_left_alone(routers: list[Router], world: World) -> None:
    world.refusals["w0"] = [StaleCommand("an older token")] * 9
    site = await routers[0].where()
    assert site is not None and site.worker_id == "w1" and world.told == ["w0"] * 3 + ["w1"]


async def test_a_worker_without_the_command_is_sent_the_requests(routers: list[Router], world: World) -> None:
    world.refusals["w0"] = [InternalError("not implemented")]
    site = await routers[0].where()
    assert site is not None and site.worker_id == "w0" and world.told == ["w0"]


async def test_where_no_worker_can_be_asked_the_name_decides(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    world.refusals = {worker: [Unavailable("full")] for worker in ("w0", "w1")}
    assert await routers[0].where() is None
    assert await lease(client) is None and routers[0].desk.coming() == {}


async def test_a_worker_that_says_how_long_it_takes_is_believed(routers: list[Router], world: World) -> None:
    world.eta_s = 12.5
    site = await routers[0].where()
    assert site is not None and site.eta_s == 12.5 and routers[0].desk.site(MODEL) == site


async def test_a_redis_that_hangs_costs_one_short_wait_and_then_none(routers: list[Router], world: World) -> None:
    router = routers[0]
    router.leases.hangs = True
    assert await asyncio.gather(*(router.where() for _ in range(50))) == [None] * 50
    assert router.leases.num_asked == 1 and router.desk.is_away
    for _ in range(50):
        assert await router.where() is None
    assert router.leases.num_asked == 1
    assert world.told == []


async def test_a_redis_that_comes_back_is_found_without_a_request(
    routers: list[Router], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_desk, "AWAY_S", 0.05)
    monkeypatch.setattr(load_desk, "EXCHANGE_TIMEOUT_S", 0.1)
    router = routers[0]
    router.leases.hangs = True
    assert await router.where() is None
    router.leases.hangs = False
    await until(world, lambda: not router.desk.is_away)
    site = await router.where()
    assert site is not None and world.told == ["w0"]


async def test_a_redis_that_goes_during_a_load_takes_nothing_from_those_who_wait(
    routers: list[Router], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_desk, "LEASE_TTL_S", 0.3)
    router = routers[0]
    await router.where()

    async def gone(*_: object) -> bool:
        raise Unavailable("gone")

    monkeypatch.setattr(router.leases, "renew", gone)
    await until(world, lambda: router.desk.is_away)
    site = await router.where()
    assert site is not None and site.worker_id == "w0" and world.told == ["w0"]


async def test_a_lease_whose_answer_was_lost_is_taken_up(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    lost = await Leases(client, "r0").take(KEY, 5.0, "w1")
    assert lost is not None
    site = await routers[0].where()
    assert site is not None and site.worker_id == "w1" and world.tokens == [lost.token]


async def test_a_lease_on_a_worker_that_cannot_be_reached_is_waited_for_until_it_ends(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    other = Leases(client, "r9")
    taken = await other.take(KEY, 60.0, "gone")
    assert taken is not None
    waiting = asyncio.create_task(routers[0].where())
    await until(world, lambda: routers[0].leases.num_asked >= 2)
    assert not waiting.done()
    await other.release(KEY, taken)
    world.notify()
    site = await waiting
    assert site is not None and site.worker_id == "w0"


@pytest.mark.parametrize("text", ["damaged", LeaseRecord("r9", 1, "gone").to_json()])
async def test_a_lease_that_leads_nowhere_holds_nobody_up_for_ever(
    routers: list[Router],
    world: World,
    client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
) -> None:
    monkeypatch.setattr(load_desk, "PATIENCE_S", 0.2)
    await client.set(KEY, text, ex=3600)
    assert await routers[0].where() is None
    assert world.told == []


async def test_a_desk_that_closes_gives_its_leases_back(
    routers: list[Router], world: World, client: redis.asyncio.Redis
) -> None:
    await routers[0].where()
    await routers[0].desk.close()
    assert await lease(client) is None


async def test_a_fault_in_choosing_lets_the_name_decide(routers: list[Router], world: World) -> None:
    def broken(avoid: frozenset[str]) -> str | None:
        raise RuntimeError("a fault")

    assert await routers[0].desk.where(MODEL, broken) is None
    assert await routers[0].where() is not None
