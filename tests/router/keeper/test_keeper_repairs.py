"""What the keeper repairs, and what it leaves alone: missing copies, leaving workers, drift, and room in pieces."""

from __future__ import annotations

import dataclasses

import pytest
from keeper_world import Copy, World, entry

from naru_proto.registry import ModelRecord
from naru_router.core.keeper.keeper import Keeper
from naru_router.core.keeper.model import Direction, KeeperLimits, Reason


def world_of(*workers: str, budget: int = 100, **entries: ModelRecord) -> World:
    return World(entries, dict.fromkeys(workers, budget))


def reasons(world: World) -> list[tuple[Direction, Reason, str, str]]:
    return [(m.direction, m.reason, m.model, m.worker_id) for _, m in world.moves]


UP, DOWN = Direction.UP, Direction.DOWN


def test_missing_copies_come_up_when_nobody_else_has_brought_them() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 2)), Keeper()
    world.put("a", "w0")
    world.run(10, keeper)
    assert world.moves == [], "the control plane has its time"
    world.run(2, keeper)
    assert reasons(world) == [(UP, Reason.MISSING, "a", "w1")]
    world.run(60, keeper)
    assert len(world.moves) == 1


def test_a_copy_that_the_control_plane_loads_is_not_loaded_twice() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 1)), Keeper()
    world.load_s = 60.0
    world.run(5, keeper)
    world.copies["a", "w0"] = Copy(world.now_s + world.load_s)
    world.run(200, keeper)
    assert world.moves == []


def test_models_on_demand_are_left_to_their_first_request() -> None:
    world, keeper = world_of("w0", a=entry("a", 1, on_demand=True)), Keeper()
    world.run(300, keeper)
    assert world.moves == []


def test_the_least_copies_of_a_model_on_demand_are_there_while_it_is_used() -> None:
    world, keeper = world_of("w0", "w1", "w2", a=entry("a", 2, on_demand=True)), Keeper()
    world.put("a", "w0")
    world.run(60, keeper)
    assert world.moves == []
    world.offered["a"] = 1
    world.run(60, keeper)
    assert len(world.up("a")) == 2


def test_a_worker_that_does_not_know_the_model_is_passed_over() -> None:
    world, keeper = world_of("w0", "w1", "w2", a=entry("a", 1)), Keeper()
    world.unaware = {("a", "w0"), ("a", "w1")}
    world.run(20, keeper)
    assert world.up("a") == ["w2"] and [m.worker_id for _, m in world.refusals] == ["w0", "w1"]


def test_a_model_that_fails_everywhere_is_tried_less_and_less() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 1)), Keeper()
    world.failing = {("a", "w0"), ("a", "w1")}
    world.run(3600, keeper, step_s=2)
    pauses = [b - a for (a, _), (b, _) in zip(world.moves, world.moves[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[-1] >= KeeperLimits().max_cool_down_s
    assert len(world.moves) < 15


def test_models_in_use_come_up_elsewhere_before_their_worker_ends() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 0, on_demand=True), b=entry("b", 0)), Keeper()
    world.put("a", "w0")
    world.offered["a"] = 1
    world.run(10, keeper)
    world.leaving = {"w0"}
    world.run(2, keeper)
    assert reasons(world) == [(UP, Reason.LEAVING, "a", "w1")]
    world.run(60, keeper)
    assert len(world.moves) == 1, "the leaving one serves on"


def test_what_must_be_up_is_moved_by_the_control_plane_first() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 1)), Keeper()
    world.put("a", "w0")
    world.run(10, keeper)
    world.leaving = {"w0"}
    world.run(3, keeper)
    assert world.moves == []
    world.run(2, keeper)
    assert reasons(world) == [(UP, Reason.LEAVING, "a", "w1")]


def test_what_nobody_uses_goes_down_on_a_worker_that_leaves_so_that_it_can() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 0, on_demand=True)), Keeper(KeeperLimits(recent_s=30.0))
    world.put("a", "w0")
    world.run(10, keeper)
    world.leaving = {"w0"}
    world.run(40, keeper)
    assert reasons(world) == [(DOWN, Reason.LEAVING, "a", "w0")]


def test_copies_above_the_most_go_idlest_first_and_never_a_busy_one() -> None:
    world, keeper = world_of("w0", "w1", "w2", a=entry("a", 1, 1)), Keeper()
    world.put("a", "w0", "w1", "w2")
    world.offered["a"] = 1  # on w0
    world.run(10, keeper)
    assert world.moves == []
    world.run(60, keeper)
    assert [(reason, w) for _, reason, _, w in reasons(world)] == [(Reason.SURPLUS, "w1"), (Reason.SURPLUS, "w2")]


def test_a_copy_in_a_pool_that_may_not_hold_it_goes_when_another_is_ready() -> None:
    world, keeper = world_of("w0", "w1", a=entry("a", 1, pools=("gpu",))), Keeper()
    world.pools = {"w0": "cpu", "w1": "gpu"}
    world.put("a", "w0")
    world.run(60, keeper)
    assert reasons(world) == [(UP, Reason.MISSING, "a", "w1"), (DOWN, Reason.MISPLACED, "a", "w0")]


def test_a_misplaced_copy_that_is_the_only_one_stays() -> None:
    world, keeper = world_of("w0", a=entry("a", 1, pools=("gpu",))), Keeper()
    world.pools = {"w0": "cpu"}
    world.put("a", "w0")
    world.run(300, keeper)
    assert world.moves == []


@pytest.mark.parametrize("is_target", [True, False])
def test_of_revisions_only_the_one_that_serves_is_scaled(is_target: bool) -> None:
    revision = dataclasses.replace(entry("a@1", 1), is_revision=True)
    other = dataclasses.replace(entry("a@2", 1), is_revision=True)
    served = dataclasses.replace(entry("a", 1), target="a@1" if is_target else "a@2")
    world = World({"a": served, "a@1": revision, "a@2": other}, dict.fromkeys(("w0", "w1", "w2"), 100))
    world.put("a@1", "w0")
    world.put("a@2", "w1")
    world.offered["a@1"] = 40
    world.run(120, Keeper())
    moved = {m.model for _, m in world.moves}
    assert moved == ({"a@1"} if is_target else set())


def test_idle_copies_move_together_when_a_wanted_model_fits_nowhere() -> None:
    """60 free on each worker, and 100 wanted: one of the small idle ones makes room on the other worker."""
    world = world_of("w0", "w1", a=entry("a"), b=entry("b"), big=entry("big"))
    world.sizes = {"a": 40, "b": 40}
    world.put("a", "w0")
    world.put("b", "w1")
    keeper = Keeper()
    world.run(200, keeper)
    ups = world.told(UP)
    assert [m.reason for m in ups] == [Reason.DEFRAGMENT, Reason.MISSING]
    assert ups[0].model in ("a", "b") and ups[1].model == "big"
    (down,) = world.told(DOWN)
    assert down.reason is Reason.DEFRAGMENT and down.model == ups[0].model
    assert len(world.up("a")) == len(world.up("b")) == len(world.up("big")) == 1
    first_up, first_down = (next(at for at, m in world.moves if m.direction is d) for d in (UP, DOWN))
    assert first_down >= first_up + world.load_s, "it is ready at its new place before it leaves the old one"
    world.moves.clear()
    world.run(600, keeper)
    assert world.moves == []


def test_busy_copies_are_not_moved_to_make_room() -> None:
    world = world_of("w0", "w1", a=entry("a"), b=entry("b"), big=entry("big"))
    world.sizes = {"a": 40, "b": 40}
    world.put("a", "w0")
    world.put("b", "w1")
    world.offered = {"a": 1, "b": 1}
    world.run(300, Keeper())
    assert world.moves == []


def test_a_copy_that_came_up_lately_is_not_evicted_for_another_model() -> None:
    world = world_of("w0", a=entry("a", 1), b=entry("b", 0, on_demand=True))
    keeper = Keeper(KeeperLimits(recent_s=10.0, min_residency_s=400.0))
    world.put("b", "w0")
    world.run(395, keeper)
    assert world.moves == []
    world.run(70, keeper)
    assert reasons(world) == [(UP, Reason.MISSING, "a", "w0")] and world.num_evictions == 1


def test_no_more_moves_are_under_way_than_the_limit() -> None:
    names = [f"m{i}" for i in range(12)]
    world = World({n: entry(n) for n in names}, {f"w{i}": 100 for i in range(12)}, load_s=30.0)
    most = 0

    def count(world: World) -> None:
        nonlocal most
        most = max(most, sum(copy.ready_s > world.now_s for copy in world.copies.values()))

    world.run(200, Keeper(), each=count)
    assert most == KeeperLimits().max_moves and all(len(world.up(n)) == 1 for n in names)


def test_it_says_how_a_model_stands() -> None:
    world, keeper = world_of("w0", a=entry("a", 2)), Keeper()
    world.put("a", "w0")
    world.run(30, keeper)
    lines = keeper.explain(world.view(), "a", world.now_s)
    assert lines[0] == "1 copies up; at least 2, at most as many as there are workers"
    assert lines[1].startswith("one more is wanted, missing: 1 of at least 2 copies are up, for 29 s")
    assert "fits nowhere" in lines[2]
