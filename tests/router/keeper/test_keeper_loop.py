"""The keeper's loop against a real Redis: one keeper, fenced moves, and what happens when things are away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import redis.asyncio
from keeper_world import Copy, World, entry

from naru_proto import names
from naru_proto.errors import Unavailable
from naru_proto.v1 import worker_pb2
from naru_router.adapters.keeper.loop import KeeperLoop
from naru_router.adapters.leases import Leases, connect
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import KeeperView

if TYPE_CHECKING:
    pass


class Fleet:
    """The virtual workers behind the Move call."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: list[tuple[str, worker_pb2.MoveRequest]] = []
        self.refusal = ""

    async def move(self, worker_id: str, request: worker_pb2.MoveRequest, timeout_s: float) -> worker_pb2.MoveReply:
        assert 0 < timeout_s <= 5
        self.requests.append((worker_id, request))
        if self.refusal:
            raise Unavailable(self.refusal)
        place = request.model, worker_id
        if request.tier == worker_pb2.TIER_ACTIVE:
            assert place not in self.world.copies
            self.world.copies[place] = Copy(self.world.now_s)
        else:
            del self.world.copies[place]
        return worker_pb2.MoveReply()

    def view(self) -> KeeperView:
        return self.world.view()


class Counts:
    """Metrics as lists."""

    def __init__(self) -> None:
        self.is_keeper = False
        self.became_keeper = asyncio.Event()
        self.moves: list[tuple[str, str, str]] = []

    def set_keeper(self, is_keeper: bool) -> None:
        self.is_keeper = is_keeper
        if is_keeper:
            self.became_keeper.set()

    def count_move(self, direction: str, reason: str, outcome: str) -> None:
        self.moves.append((direction, reason, outcome))


class Router:
    """One keeper loop, ticked by hand on the world's clock."""

    def __init__(self, name: str, fleet: Fleet, client: redis.asyncio.Redis) -> None:
        self.fleet = fleet
        self.counts = Counts()
        self.leases = Leases(client, name)
        self.loop = KeeperLoop(
            Keeper(),
            fleet,
            fleet,
            self.leases,
            self.counts,
            interval_s=0.01,
            takeover_pause_s=2.0,
            clock=lambda: fleet.world.now_s,
        )

    async def run(self, seconds: int, *others: Router) -> None:
        for _ in range(seconds):
            self.fleet.world.now_s += 1.0
            for router in (self, *others):
                await router.loop.tick()


@pytest.fixture
def fleet() -> Fleet:
    """Two workers; a model with one copy missing."""
    world = World({"a": entry("a", 2, 2)}, {"w0": 100, "w1": 100})
    world.put("a", "w0")
    return Fleet(world)


async def test_of_two_routers_one_moves_and_names_its_tokens(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    one, two = Router("one", fleet, client), Router("two", fleet, client)
    await one.run(14, two)
    assert (one.counts.is_keeper, two.counts.is_keeper) == (True, False)
    ((worker_id, request),) = fleet.requests
    keeper, load = await one.leases.read(names.KEY_KEEPER), await one.leases.read(names.key_load_lease("a"))
    assert keeper is not None and keeper.holder == "one"
    assert load is not None and (load.holder, load.worker_id) == ("one", "w1")
    assert (worker_id, request.model, request.tier) == ("w1", "a", worker_pb2.TIER_ACTIVE)
    assert request.fencing_token == load.token > keeper.token and not request.only_if_idle
    assert one.counts.moves == [("up", "missing", "done")] and two.counts.moves == []
    assert [(n.move.worker_id, n.refusal) for n in one.loop.recent] == [("w1", "")]


async def test_a_copy_goes_down_only_if_idle_under_a_fresh_token(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    fleet.world.entries["a"] = entry("a", 1, 1)
    fleet.world.put("a", "w1")
    router = Router("one", fleet, client)
    await router.run(14)
    ((_, request),) = fleet.requests
    keeper = await router.leases.read(names.KEY_KEEPER)
    assert keeper is not None and request.fencing_token > keeper.token
    assert request.only_if_idle and request.tier == worker_pb2.TIER_HOST
    assert await router.leases.read(names.key_load_lease("a")) is None


async def test_who_stops_hands_the_lease_over_and_nothing_is_moved_twice(
    client: redis.asyncio.Redis, fleet: Fleet
) -> None:
    fleet.world.entries["b"] = entry("b", 1, 1)
    fleet.world.budgets["w2"] = 100
    one, two = Router("one", fleet, client), Router("two", fleet, client)
    running = asyncio.create_task(one.loop.run())
    async with asyncio.timeout(20):
        await one.counts.became_keeper.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert not one.counts.is_keeper
    await two.run(1)
    assert two.counts.is_keeper
    await two.run(40, one)
    assert len(fleet.world.up("a")) == 2 and len(fleet.world.up("b")) == 1 and len(fleet.requests) == 2


async def test_the_next_keeper_looks_before_it_moves(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    one, two = Router("one", fleet, client), Router("two", fleet, client)
    await one.run(9, two)
    await client.delete(names.KEY_KEEPER)
    for _ in range(2):  # the lease is two's now, and the copy is missing for long enough
        fleet.world.now_s += 1.0
        await two.loop.tick()
        await one.loop.tick()
    assert two.loop.is_keeper and not one.loop.is_keeper and fleet.requests == []
    await two.run(3, one)
    assert len(fleet.requests) == 1


async def test_a_lease_that_was_lost_meanwhile_moves_nothing(
    client: redis.asyncio.Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router("one", fleet, client)
    await router.run(9)
    fleet.world.put("a", "w1")
    fleet.world.entries["a"] = entry("a", 1, 1)
    await router.run(10)
    kept = router.loop._tenure.keep

    async def keep_and_lose() -> bool:
        held = await kept()
        await client.delete(names.KEY_KEEPER)  # between its renewal and the move
        return held

    monkeypatch.setattr(router.loop._tenure, "keep", keep_and_lose)
    await router.run(1)
    assert fleet.requests == [] and router.counts.moves == []


async def test_a_model_that_comes_up_for_a_request_is_left_to_it(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    router, other = Router("one", fleet, client), Leases(client, "other")
    lease = await other.take(names.key_load_lease("a"), 60.0, "w1")
    assert lease is not None
    await router.run(30)
    assert fleet.requests == [] and router.counts.moves == []
    await other.release(names.key_load_lease("a"), lease)
    await router.run(6)
    assert [worker for worker, _ in fleet.requests] == ["w1"]


async def test_a_refusal_is_noted_and_the_load_lease_given_back(client: redis.asyncio.Redis, fleet: Fleet) -> None:
    router = Router("one", fleet, client)
    fleet.refusal = "model 'a' failed here"
    await router.run(14)
    assert router.counts.moves == [("up", "missing", "refused")]
    assert router.loop.recent[-1].refusal == "model 'a' failed here"
    assert await router.leases.read(names.key_load_lease("a")) is None
    fleet.refusal = ""
    await router.run(40)
    assert fleet.world.up("a") == ["w0", "w1"]


async def test_without_redis_nothing_moves_and_it_is_said_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    client = connect("unix:///nonexistent/redis.sock")
    router = Router("one", fleet, client)
    await router.run(20)
    assert fleet.requests == [] and not router.counts.is_keeper
    assert len([r for r in caplog.records if "Redis is away" in r.getMessage()]) == 1
    await client.aclose()


async def test_a_view_that_cannot_be_made_does_not_end_the_watch(
    client: redis.asyncio.Redis, fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router("one", fleet, client)
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "view", lambda: 1 / 0)
        await router.run(2)
    assert "failed on what it saw" in caplog.text
    await router.run(14)
    assert len(fleet.requests) == 1
