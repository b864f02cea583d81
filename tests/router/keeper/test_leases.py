"""Leases against a real Redis: one holder at a time, tokens that only grow, and what damage and loss do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from naru_proto import names
from naru_proto.errors import Unavailable
from naru_proto.registry import LeaseRecord, RouterRecord
from naru_router.adapters.leases import Leases, Tenure, connect
from naru_router.adapters.presence import Presence

if TYPE_CHECKING:
    pass

KEY = names.key_load_lease("llama@1")


class Clock:
    """Monotonic seconds that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_one_router_at_a_time_holds_a_lease_and_each_taking_gets_a_larger_token(
    client: redis.asyncio.Redis,
) -> None:
    a, b = Leases(client, "a"), Leases(client, "b")
    first = await a.take(KEY, 5.0, "w1")
    assert first is not None
    assert await b.take(KEY, 5.0) is None
    assert await a.take(KEY, 5.0) is None
    assert await b.read(KEY) == first == LeaseRecord("a", first.token, "w1")
    assert await a.release(KEY, first)
    second = await b.take(KEY, 5.0)
    assert second is not None and second.token > first.token
    assert not await a.release(KEY, first)
    assert not await a.renew(KEY, first, 5.0)
    assert await a.fence(KEY, first) == 0
    assert await b.read(KEY) == second


async def test_renewing_moves_the_end(client: redis.asyncio.Redis) -> None:
    leases = Leases(client, "a")
    record = await leases.take(KEY, 1.0)
    assert record is not None
    assert await leases.renew(KEY, record, 60.0)
    assert 59_000 < await client.pttl(KEY) <= 60_000


async def test_a_token_for_one_act_is_newer_than_the_lease_and_than_leases_taken_since(
    client: redis.asyncio.Redis,
) -> None:
    leases = Leases(client, "a")
    keeper = await leases.take(names.KEY_KEEPER, 5.0)
    load = await leases.take(KEY, 5.0)
    assert keeper is not None and load is not None
    assert keeper.token < load.token < await leases.fence(names.KEY_KEEPER, keeper)


async def test_tokens_grow_over_the_loss_of_everything(client: redis.asyncio.Redis) -> None:
    leases = Leases(client, "a")
    before = await leases.take(KEY, 5.0)
    await client.flushall()
    after = await leases.take(KEY, 5.0)
    assert before is not None and after is not None and after.token > before.token


@pytest.mark.parametrize("damage", [b"not a number", b"", b"1e400", b"99999999999999999999"])
async def test_a_damaged_counter_starts_anew(client: redis.asyncio.Redis, damage: bytes) -> None:
    await client.set(names.KEY_FENCE, damage)
    record = await Leases(client, "a").take(KEY, 5.0)
    assert record is not None and record.token > 1_600_000_000_000_000


async def test_a_counter_of_another_type_starts_anew(client: redis.asyncio.Redis) -> None:
    await client.hset(names.KEY_FENCE, "a", "b")
    assert await Leases(client, "a").take(KEY, 5.0) is not None


async def test_what_is_no_lease_stops_nobody_for_ever(client: redis.asyncio.Redis) -> None:
    leases = Leases(client, "a")
    await client.set(KEY, b"{damaged")  # without an end
    record = await leases.take(KEY, 5.0)
    assert record is not None and await leases.read(KEY) == record
    await client.set(KEY, b"{damaged", px=60_000)
    assert await leases.read(KEY) is None
    assert await leases.take(KEY, 5.0) is None  # somebody's, until it ends
    assert not await leases.renew(KEY, record, 5.0)
    await client.delete(KEY)
    await client.lpush(KEY, "x")
    assert not await leases.release(KEY, record)
    assert await leases.take(KEY, 5.0) is not None


@pytest.mark.parametrize("text", ['{"holder": 1, "token": 2}', '{"holder": "a", "token": "2"}', "[]", '{"token": 1}'])
async def test_a_lease_of_wrong_types_is_read_as_none(client: redis.asyncio.Redis, text: str) -> None:
    await client.set(KEY, text, px=60_000)
    assert await Leases(client, "a").read(KEY) is None


async def test_names_with_quotes_stay_what_they_are(client: redis.asyncio.Redis) -> None:
    leases = Leases(client, 'a"token":0\\')
    record = await leases.take(KEY, 5.0, 'w","token":0')
    assert record is not None and await leases.read(KEY) == record
    assert await leases.release(KEY, record)


async def test_a_redis_that_is_away_is_said_so() -> None:
    client = connect("unix:///nonexistent/redis.sock")
    leases = Leases(client, "a")
    for call in (leases.take(KEY, 1.0), leases.read(KEY), leases.renew(KEY, LeaseRecord("a", 1), 1.0)):
        with pytest.raises(Unavailable, match="cannot be had"):
            await call
    await client.aclose()


async def test_a_holder_stops_before_its_lease_ends_whatever_the_clocks_say(client: redis.asyncio.Redis) -> None:
    clock = Clock()
    tenure = Tenure(Leases(client, "a"), KEY, 5.0, clock=clock)
    assert not tenure.is_held
    assert await tenure.keep()
    clock.now_s += 4.2
    assert tenure.is_held
    clock.now_s += 0.1
    assert not tenure.is_held and await tenure.fence() == 0
    assert await tenure.keep()  # Redis has it as ours still
    assert await tenure.fence() > 0


async def test_who_lost_a_lease_takes_it_again_under_a_newer_token(client: redis.asyncio.Redis) -> None:
    a, b = Tenure(Leases(client, "a"), KEY, 5.0), Tenure(Leases(client, "b"), KEY, 5.0)
    assert await a.keep() and not await b.keep()
    await client.delete(KEY)
    assert await b.keep() and not await a.keep()
    assert await a.fence() == 0
    await b.give_up()
    assert not b.is_held
    assert await a.keep()


async def test_routers_count_one_another_and_not_the_dead(client: redis.asyncio.Redis) -> None:
    one, two = (Presence(client, RouterRecord(i, f"{i}:8080", 1)) for i in ("one", "two"))
    await client.sadd(names.KEY_ROUTERS, "dead")
    await one.renew()
    assert one.num_routers == 1
    await two.renew()
    await one.renew()
    assert one.num_routers == two.num_routers == 2 and one.router_ids == ("one", "two")
    assert await client.smembers(names.KEY_ROUTERS) == {b"one", b"two"}
    assert 0 < await client.pttl(names.key_router("one")) <= names.ROUTER_LEASE_TTL_S * 1000
    await client.delete(names.key_router("two"))
    await one.renew()
    assert one.num_routers == 1


async def test_without_redis_the_last_count_stays(caplog: pytest.LogCaptureFixture) -> None:
    client = connect("unix:///nonexistent/redis.sock")
    presence = Presence(client, RouterRecord("one", ""))
    await presence.renew()
    await presence.renew()
    assert presence.num_routers == 1
    assert len([r for r in caplog.records if "does not answer" in r.getMessage()]) == 1
    await client.aclose()
