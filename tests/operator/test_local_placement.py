"""Where the plan of one machine puts models, and who is told of them beside that."""

from __future__ import annotations

from local_world import World, desired, model, pool

from naru_operator.core.desired import Tier
from naru_operator.core.local_plan import ObservedWorker, Snapshot, Where, place
from naru_operator.core.model_plan import KNOWN
from naru_operator.core.placement import PlacementFacts
from naru_proto.registry import FootprintRecord, WorkerRecord


def test_models_spread_over_workers_and_copies_too() -> None:
    pools = (pool(2),)
    world = World()
    world.settle(desired(model("a"), model("b"), model("c", min_replicas=2), pools=pools))
    assert {w: sorted(models) for w, (_, models) in world.workers.items()} == {"p-0": ["a", "c"], "p-1": ["b", "c"]}


def test_more_copies_than_workers_are_one_each_and_none_is_at_least_one() -> None:
    snapshot = Snapshot(desired(model("a", min_replicas=9), model("b", min_replicas=0), pools=(pool(2),)), (), {}, {})
    assert place(snapshot) == Where({"a": ("p-0", "p-1"), "b": ("p-0",)}, {})


def test_a_model_that_may_have_more_copies_is_known_where_it_is_not_loaded() -> None:
    world = World()
    state = desired(model("a", max_replicas=0), pools=(pool(3),))
    world.settle(state)
    assert [models["a"].state for _, models in world.workers.values()] == ["ready", KNOWN, KNOWN]
    # The keeper brings one up; what it does is left alone, and a copy that is lost with its process comes up again.
    world.move("p-1", "a", "ready")
    assert world.step(state).is_empty
    world.move("p-1", "a", KNOWN)
    world.workers["p-0"] = (pool(3), {})
    steps = world.step(state)
    assert [(load.worker_id, load.residency.tier) for load in steps.load_models] == [("p-0", Tier.ACTIVE)]


def test_models_go_where_they_fit_by_what_workers_and_footprints_say() -> None:
    workers = tuple(
        ObservedWorker(worker_id, pool(2), True, {}, WorkerRecord(worker_id, "x:1", "e", {}, budget_bytes=budget))
        for worker_id, budget in (("p-0", 100), ("p-1", 50))
    )
    facts = PlacementFacts({"a": FootprintRecord(40, 10), "b": FootprintRecord(200, 10)})
    where = place(Snapshot(desired(model("a"), model("b"), pools=(pool(2),)), workers, {}, {}, facts=facts))
    assert where.copies == {"a": ("p-1",), "b": ()}
    assert where.known == {"b": ("p-0", "p-1")}, "whoever is asked says why it cannot be"


def test_commands_say_whether_they_bring_a_copy_or_only_word_of_the_model() -> None:
    world = World()
    state = desired(model("a", max_replicas=0), pools=(pool(2),))
    world.step(state)
    assert [(load.worker_id, load.is_spare) for load in world.step(state).load_models] == [
        ("p-0", False),
        ("p-1", True),
    ]


def test_a_new_model_moves_none_that_is_placed() -> None:
    world = World()
    world.settle(desired(model("m"), pools=(pool(2),)))
    steps = world.step(desired(model("a"), model("m"), pools=(pool(2),)))
    assert steps.unload_models == ()
    assert [(load.worker_id, load.model) for load in steps.load_models] == [("p-1", "a")]
