"""Where the plan puts copies, who is told of a model beside them, and what is left to the routers' keeper."""

from __future__ import annotations

import pytest
from model_world import COPY_BYTES, Held, Worker, World, raw_model, revision_of, steps, verdict, world_of

from naru_operator.core.model_plan import EVICTED, KNOWN
from naru_operator.core.placement import PlacementFacts
from naru_proto.registry import FootprintRecord, KnownRecord

ANY = {"min": 1, "max": None}
FOOTPRINT = FootprintRecord(weight_bytes=COPY_BYTES - 2, kv_min_bytes=1, private_bytes=1)


def test_a_model_that_may_have_more_copies_is_known_on_all_workers_and_loaded_on_as_many_as_asked() -> None:
    world = world_of(num_workers=3, replicas={"min": 1, "max": 2})
    name = revision_of(world, "m")
    assert sorted(world.states(name).values()) == [KNOWN, KNOWN, "ready"]
    world.workers["p-9"] = Worker("p")
    assert steps(world) == ([("p-9", name)], [])
    assert world.states(name)["p-9"] == KNOWN
    world.settle()
    world.restart_operator()
    assert world.plan().is_empty
    world.edit("m", replicas={"min": 1, "max": 1})
    loads, unloads = steps(world)
    assert (loads, len(unloads)) == ([], 3)


def test_a_copy_whose_worker_dies_comes_up_at_once_and_one_that_was_evicted_does_not() -> None:
    world = world_of(num_workers=2, replicas=ANY)
    name = revision_of(world, "m")
    (holder,) = world.ready_on(name)
    world.workers[holder].models[name].state = EVICTED
    assert world.plan().is_empty
    del world.workers[holder]
    (load,) = world.turn().load_models
    assert (load.model, load.residency.tier.value) == (name, "active")


def test_copies_that_the_keeper_brought_up_stay_and_are_told_of_changes_as_they_are() -> None:
    world = world_of(num_workers=3, replicas=ANY)
    name = revision_of(world, "m")
    for worker in world.workers.values():
        worker.models[name].state = "ready"
    assert world.plan().is_empty
    world.edit("m", residency={"policy": "Preferred", "priority": 300})
    plan = world.turn()
    assert plan.unload_models == ()
    assert [load.residency.tier.value for load in plan.load_models] == ["active"] * 3
    assert len(world.ready_on(name)) == 3
    world.edit("m", replicas={"min": 1, "max": 1})
    assert len(steps(world)[1]) == 2


def test_what_fits_nowhere_is_not_loaded_but_known_and_says_so() -> None:
    world = world_of(num_workers=2)
    for worker in world.workers.values():
        worker.budget_bytes = COPY_BYTES
    world.apply(raw_model("a"))
    world.apply(raw_model("n"))
    late, name = revision_of(world, "n"), revision_of(world, "a")
    world.facts = PlacementFacts({late: FOOTPRINT, name: FOOTPRINT})
    world.settle()
    assert list(world.states(name).values()) == ["ready"]
    assert list(world.states(late).values()) == [KNOWN], "one worker is enough to bring it up"
    (worker_id,) = world.states(late)
    world.restart_operator()
    assert world.plan().is_empty
    found = next(each for key, each in world.plan().verdicts.items() if key.name == "n")
    assert found.rollout_message.endswith("; no worker has room for a further copy")
    assert found.placed_on == ()
    # Requests bring it up by the worker's own rules: then it is a copy like others.
    for state in ("ready", KNOWN):
        world.workers[worker_id].models[late].state = state
        assert not (world.plan().load_models or world.plan().unload_models)
    for key in [key for key in world.objects if key.name != "n"]:
        world.delete(key)
    world.settle()
    assert len(world.ready_on(late)) == 1


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "a rollout"])
def test_where_room_must_be_made_the_worker_makes_it(is_pinned: bool) -> None:
    world = world_of(num_workers=1)
    world.workers["p-0"].budget_bytes = COPY_BYTES
    old = revision_of(world, "m")
    if is_pinned:
        world.apply(raw_model("n", residency={"policy": "Pinned"}))
        new = revision_of(world, "n")
    else:
        world.edit("m", model={"uri": "pypi://two"})
        new = revision_of(world, "m")
    world.facts = PlacementFacts({old: FOOTPRINT, new: FOOTPRINT})
    assert steps(world)[0] == [("p-0", new)]


def test_a_second_copy_goes_to_another_zone_by_the_labels_of_nodes() -> None:
    world = World(p_0="p", p_1="p", p_2="p")
    zones = {"n0": "x", "n1": "x", "n2": "y"}
    for index, worker in enumerate(world.workers.values()):
        worker.node = f"n{index}"
    world.facts = PlacementFacts(nodes={node: {"zone": zone} for node, zone in zones.items()})
    world.apply(raw_model("m", replicas={"min": 2}, placement={"spreadTopologyKey": "zone"}))
    world.settle()
    assert world.ready_on(revision_of(world, "m")) == ["p-0", "p-2"]


def test_a_new_copy_goes_where_its_files_are() -> None:
    world = World(p_0="p", p_1="p", p_2="p")
    world.apply(raw_model("m"))
    name = revision_of(world, "m")
    world.facts = PlacementFacts(near={"p-2": {name: KnownRecord("disk", 8)}})
    world.settle()
    assert world.ready_on(name) == ["p-2"]


def test_loads_under_way_count_as_taken() -> None:
    world = World(p_0="p", p_1="p")
    for worker in world.workers.values():
        worker.budget_bytes = 2 * COPY_BYTES - 1
    first, second = (raw_model(name) for name in ("a", "b"))
    for raw in (first, second):
        world.apply(raw)
    names = [revision_of(world, "a"), revision_of(world, "b")]
    world.facts = PlacementFacts(dict.fromkeys(names, FOOTPRINT))
    world.workers["p-0"].models[names[0]] = Held("loading", 1, "pypi://a")
    assert ("p-1", names[1]) in steps(world)[0]
    assert world.states(names[1]).keys() == {"p-1"}


def test_a_failed_revision_is_tried_on_no_further_worker_though_it_may_have_more_copies() -> None:
    world = world_of(num_workers=3, replicas=ANY)
    world.edit("m", model={"uri": "pypi://bad"})
    world.settle()
    new = revision_of(world, "m")
    assert sorted(world.states(new).values()).count("failed") == 1
    assert verdict(world).has_rollout_failed
