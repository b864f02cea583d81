"""Copies follow load, in virtual time: up to what is needed, down after the delay, and never back and forth."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_world import World, entry

from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import Direction, KeeperLimits, Move, Reason

LIMITS = KeeperLimits()


def world_of(num_workers: int, budget: int = 100, **more: object) -> World:
    made = World({"a": entry("a")}, {f"w{i}": budget for i in range(num_workers)}, **more)  # type: ignore[arg-type]
    made.put("a", "w0")
    return made


def times(world: World, direction: Direction) -> list[float]:
    return [at_s for at_s, move in world.moves if move.direction is direction]


@pytest.mark.parametrize(("in_flight", "copies"), [(16, 1), (17, 2), (40, 3), (100, 5)])
def test_copies_grow_to_what_the_load_needs_and_no_further(in_flight: int, copies: int) -> None:
    world, keeper = world_of(5), Keeper()
    world.run(60, keeper)
    world.offered["a"] = in_flight
    world.run(600, keeper)
    assert len(world.up("a")) == copies and len(world.moves) == copies - 1
    assert {move.reason for _, move in world.moves} <= {Reason.HOT}
    ups = times(world, Direction.UP)
    assert all(later - earlier >= LIMITS.cool_down_s for earlier, later in itertools.pairwise(ups))


def test_a_burst_shorter_than_the_window_adds_nothing() -> None:
    world, keeper = world_of(3), Keeper()
    for _ in range(10):
        world.offered["a"] = 24
        world.run(8, keeper)
        world.offered["a"] = 0
        world.run(60, keeper)
    assert world.moves == []


def test_the_most_copies_are_a_limit() -> None:
    world, keeper = world_of(5), Keeper()
    world.entries["a"] = entry("a", 1, 2)
    world.offered["a"] = 500
    world.run(600, keeper)
    assert len(world.up("a")) == 2


def test_a_load_under_way_counts_and_nothing_is_added_beside_it() -> None:
    world, keeper = world_of(5, load_s=200.0), Keeper()
    world.offered["a"] = 100
    world.run(150, keeper)
    assert len(world.moves) == 1


def test_spare_copies_go_after_the_delay_one_by_one_and_the_last_stays() -> None:
    world, keeper = world_of(4), Keeper()
    world.put("a", "w1", "w2", "w3")
    world.offered["a"] = 60
    world.run(200, keeper)
    assert world.moves == []
    world.offered["a"] = 0
    world.run(120, keeper)
    assert world.moves == [], "the delay is not over"
    world.run(400, keeper)
    assert len(world.up("a")) == 1
    downs = times(world, Direction.DOWN)
    assert len(downs) == 3 and all(b - a >= LIMITS.cool_down_s for a, b in itertools.pairwise(downs))


def test_least_copies_stay_without_any_load() -> None:
    world, keeper = world_of(4), Keeper()
    world.entries["a"] = entry("a", 2)
    world.put("a", "w1", "w2", "w3")
    world.run(1000, keeper)
    assert len(world.up("a")) == 2


def test_load_that_returns_within_the_delay_removes_nothing() -> None:
    world, keeper = world_of(3), Keeper()
    world.put("a", "w1", "w2")
    for _ in range(10):
        world.offered["a"] = 45
        world.run(60, keeper)
        world.offered["a"] = 0
        world.run(60, keeper)
    assert world.moves == []


def test_the_copy_that_was_used_longest_ago_goes_first() -> None:
    world, keeper = world_of(3), Keeper()
    world.put("a", "w1", "w2")
    for worker, used_s in (("w0", 660.0), ("w1", 60.0), ("w2", 900.0)):
        world.copies["a", worker].used_s = used_s
    world.run(150, keeper)
    assert [move.worker_id for _, move in world.moves] == ["w1", "w0"]


def test_copies_with_requests_in_flight_stay() -> None:
    world, keeper = world_of(3), Keeper()
    world.put("a", "w1", "w2")
    world.offered["a"] = 3  # one each
    world.run(1000, keeper)
    assert world.up("a") == ["w0", "w1", "w2"]


def test_queues_add_copies_where_requests_are_few_and_long() -> None:
    world, keeper = world_of(4, strength=2.0), Keeper()
    world.offered["a"] = 12  # 10 wait, 5 s
    world.run(600, keeper)
    num_up = len(world.up("a"))
    assert num_up == 3, "four each: two wait, one second, which is no shortage"
    world.moves.clear()
    world.run(2000, keeper, step_s=2)
    assert world.moves == [], "what queues taught is remembered: nothing flaps"


def test_a_router_that_has_just_started_removes_nothing_before_it_knows() -> None:
    world = world_of(3)
    world.put("a", "w1", "w2")
    world.run(100, Keeper())
    assert world.moves == []


@pytest.mark.parametrize("dies_at_s", [20, 24, 25, 26, 35, 60])
def test_when_the_keeper_dies_the_next_one_goes_on_and_nothing_is_done_twice(dies_at_s: int) -> None:
    world, first, second = world_of(6, load_s=12.0), Keeper(), Keeper()
    world.offered["a"] = 90
    start_s = world.now_s

    def acting(now_s: float) -> Keeper | None:
        """The lease of the dead ends, and the next one looks for a moment first."""
        if now_s - start_s <= dies_at_s:
            return first
        return second if now_s - start_s > dies_at_s + 5 else None

    world.run(600, first, second, acting=acting)
    assert len(world.up("a")) == 6 and len(world.moves) == 5 and not world.refusals
    ups = times(world, Direction.UP)
    assert all(later - earlier >= LIMITS.cool_down_s for earlier, later in itertools.pairwise(ups))


def test_hot_models_that_do_not_fit_together_do_not_take_turns() -> None:
    world = World({"a": entry("a"), "b": entry("b")}, {"w0": 100, "w1": 100, "w2": 100})
    world.put("a", "w0")
    world.put("b", "w1")
    keeper = Keeper()
    world.offered.update(a=40, b=40)
    world.run(3600, keeper, step_s=3)
    assert len(world.moves) == 1 and len(world.up("a")) + len(world.up("b")) == 3


@pytest.mark.parametrize("period_s", [20, 70, 130, 300])
def test_models_that_are_hot_in_turns_move_no_oftener_than_their_residency_allows(period_s: int) -> None:
    """Two models, room for one further copy, and load that jumps between them."""
    world = World({"a": entry("a"), "b": entry("b")}, {"w0": 100, "w1": 100, "w2": 100})
    world.put("a", "w0")
    world.put("b", "w1")
    keeper = Keeper()
    hour_s = 3600
    for turn in range(hour_s // period_s):
        world.offered.update(a=60 if turn % 2 else 0, b=0 if turn % 2 else 60)
        world.run(period_s, keeper, step_s=2)
    # Within the delay nobody gives way; beyond it one copy goes and one comes for each turn.
    assert len(world.moves) <= (2 if period_s < 200 else 2 * hour_s / period_s)
    assert world.num_evictions <= (1 if period_s < 200 else hour_s / period_s)


def test_a_model_that_must_be_up_is_not_evicted_for_a_hot_one() -> None:
    world = World({"a": entry("a"), "b": entry("b")}, {"w0": 100, "w1": 100})
    world.put("a", "w0")
    world.put("b", "w1")
    keeper = Keeper()
    world.offered["a"] = 100
    world.run(900, keeper)
    assert world.moves == [] and world.num_evictions == 0
    assert any("fits nowhere" in line for line in keeper.explain(world.view(), "a", world.now_s))


def test_an_unused_model_on_demand_makes_room_for_a_hot_one() -> None:
    world = World({"a": entry("a"), "b": entry("b", 0, on_demand=True)}, {"w0": 100, "w1": 100})
    world.put("a", "w0")
    world.put("b", "w1")
    keeper = Keeper(KeeperLimits(recent_s=200.0))
    world.run(300, keeper)
    world.offered["a"] = 30
    world.run(120, keeper)
    assert world.up("a") == ["w0", "w1"] and world.num_evictions == 1


PHASES = st.lists(
    st.tuples(st.lists(st.integers(0, 70), min_size=3, max_size=3), st.integers(5, 200)), min_size=1, max_size=5
)


@settings(max_examples=15, deadline=None)
@given(
    phases=PHASES,
    num_workers=st.integers(1, 5),
    budget=st.sampled_from([100, 150, 250, 1000]),
    limits=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 2, 3])), min_size=3, max_size=3),
    load_s=st.sampled_from([0.5, 5.0, 40.0]),
    strength=st.sampled_from([1e9, 6.0]),
)
def test_whatever_the_load_the_limits_hold_and_it_comes_to_rest(
    phases: list[tuple[list[int], int]],
    num_workers: int,
    budget: int,
    limits: list[tuple[int, int]],
    load_s: float,
    strength: float,
) -> None:
    names = ("a", "b", "c")
    entries = {n: entry(n, low, high) for n, (low, high) in zip(names, limits, strict=True)}
    world = World(entries, {f"w{i}": budget for i in range(num_workers)}, load_s=load_s, strength=strength)
    for index, name in enumerate(names):
        worker = f"w{index % num_workers}"
        if world._used(worker) + 100 <= budget:
            world.put(name, worker)
    held = {name for name, _ in world.copies}
    keeper = Keeper()

    def check(world: World) -> None:
        for name, record in entries.items():
            num_up = len(world.up(name))
            assert not record.max_replicas or num_up <= max(record.max_replicas, record.min_replicas)
            if name in held and not world.num_evictions:
                assert num_up >= 1
        assert all(world._used(worker) <= budget for worker in world.budgets)

    for offered, seconds in phases:
        world.offered = dict(zip(names, offered, strict=True))
        world.run(seconds, keeper, each=check, step_s=3)
    for at_s, move in world.moves:
        assert move.why and at_s
    # Constant load: first it settles, then nothing moves any more.
    world.run(900, keeper, each=check, step_s=3)
    world.moves.clear()
    world.refusals.clear()
    world.run(400, keeper, each=check, step_s=3)
    assert world.moves == [], world.moves


def test_the_reason_says_it_in_numbers() -> None:
    world, keeper = world_of(2), Keeper()
    world.offered["a"] = 40
    world.run(60, keeper)
    move: Move = world.moves[0][1]
    assert (move.reason, move.worker_id) == (Reason.HOT, "w1")
    assert "requests in flight" in move.why and "it fits" in move.why
