"""Rollouts of one model, step by step: when requests move, what stops one, and what goes when."""

from __future__ import annotations

import pytest
from model_world import KEY, START_S, Worker, World, raw_model, revision_of, steps, verdict, world_of

from naru_operator.core.kube import ObjectKey
from naru_operator.core.model_plan import KNOWN
from naru_operator.core.models.copies import RETIRE_S


def test_the_first_revision_is_registered_at_once_and_serves_when_it_is_ready() -> None:
    world = World(p_0="p")
    world.apply(raw_model("m", alias="other"))
    plan = world.turn()
    name = revision_of(world, "m")
    entry, revision = world.records["m"], world.records[name]
    assert (entry.target, entry.aliases, entry.is_revision, entry.generation) == (name, ("other",), False, 1)
    assert (revision.is_revision, revision.uri, revision.aliases, revision.pools) == (True, "pypi://m", (), ("p",))
    assert (entry.created_s, entry.max_wait_s, entry.max_depth) == (START_S, 60.0, 256)
    assert [(load.worker_id, load.model, load.generation) for load in plan.load_models] == [("p-0", name, 1)]
    (kept,) = plan.create_revisions
    assert (kept["revision"], kept["data"]) == (1, {"model": {"uri": "pypi://m"}})
    first = plan.verdicts[KEY]
    assert (first.current, first.update) == ("", name.partition("@")[2])
    assert (first.rollout_reason, first.placed_on, first.num_desired) == ("WaitingForCopies", ("p-0",), 1)
    world.settle()
    done = verdict(world)
    assert (done.current, done.rollout_reason) == (done.update, "RolloutComplete")


def test_a_new_revision_loads_beside_the_old_one_and_takes_over_when_it_has_as_many_copies() -> None:
    world = world_of(num_workers=4, replicas={"min": 2})
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://two"})
    new = revision_of(world, "m")
    loads, unloads = steps(world)
    assert ([model for _, model in loads], unloads) == ([new, new], [])
    assert {w for w, _ in loads}.isdisjoint(world.ready_on(old))
    assert (world.target("m"), verdict(world).rollout_reason) == (old, "WaitingForCopies")
    worker_id = loads[0][0]
    world.workers[worker_id].models[new].state = "ready"
    assert steps(world) == ([], [])
    assert world.target("m") == old  # one of two
    world.advance()
    assert steps(world) == ([], [])
    assert world.target("m") == new
    assert verdict(world).rollout_reason == "RolloutComplete"
    assert world.num_ready(old) == 2  # routers may not have heard of it yet
    world.now_s += RETIRE_S
    loads, unloads = steps(world)
    assert (loads, sorted({model for _, model in unloads})) == ([], [old])
    assert old in world.records
    world.advance()
    world.turn()
    assert old not in world.records
    assert world.revisions.keys() == {ObjectKey("default", each.replace("@", "-")) for each in (old, new)}


def test_a_change_of_anything_else_is_no_rollout() -> None:
    world = world_of()
    before = world.records[revision_of(world, "m")]
    world.edit("m", residency={"priority": 300}, queue={"maxWait": "5s", "maxDepth": 7}, alias="x")
    plan = world.turn()
    assert plan.create_revisions == ()
    (load,) = plan.load_models
    assert (load.generation, load.residency.priority) == (before.generation + 1, 300)
    assert (world.records["m"].aliases, world.records["m"].max_wait_s, world.records["m"].max_depth) == (("x",), 5.0, 7)
    assert verdict(world).rollout_reason == "RolloutComplete"


def test_requests_that_are_not_to_wait_are_told_to_routers_as_such() -> None:
    world = world_of(queue={"maxWait": "0s", "maxDepth": 0})
    assert (world.records["m"].max_wait_s, world.records["m"].max_depth) == (0.001, 1)


def test_a_revision_that_cannot_be_loaded_stops_and_the_old_one_goes_on() -> None:
    world = world_of(num_workers=5, replicas={"min": 2})
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://bad"})
    new = revision_of(world, "m")
    world.turn()
    world.advance()
    found = verdict(world)
    assert (found.has_rollout_failed, found.rollout_reason) == (True, "RevisionFailed")
    assert "no such package" in found.rollout_message
    assert f"revision {found.current} goes on serving" in found.rollout_message
    for worker in world.workers.values():
        if new in worker.models and worker.models[new].state == "failed":
            del worker.models[new]  # one of them starts anew
            break
    world.turn()
    world.workers["p-9"] = Worker("p")
    for _ in range(20):
        world.turn()
        world.advance(60)
    assert (world.target("m"), world.num_ready(old)) == (old, 2)
    assert len(world.states(new)) <= 2


def test_what_a_command_failed_with_stops_a_rollout_as_well() -> None:
    world = world_of()
    world.edit("m", model={"uri": "pypi://two"})
    world.failed[revision_of(world, "m")] = "generation 1 stands for other files"
    found = verdict(world)
    assert (found.has_rollout_failed, found.rollout_reason) == (True, "RevisionFailed")
    assert "stands for other files" in found.rollout_message


def test_a_failed_revision_that_its_worker_brings_up_after_all_goes_on() -> None:
    world = world_of()
    world.edit("m", model={"uri": "pypi://bad"})
    new = revision_of(world, "m")
    world.turn()
    world.advance()
    world.turn()
    assert verdict(world).has_rollout_failed
    next(worker.models[new] for worker in world.workers.values() if new in worker.models).state = "ready"
    world.turn()
    assert (world.target("m"), verdict(world).has_rollout_failed) == (new, False)


def test_a_failure_is_not_taken_back_while_its_worker_tries_again() -> None:
    world = world_of()
    world.edit("m", model={"uri": "pypi://bad"})
    new = revision_of(world, "m")
    world.turn()
    world.advance()
    world.turn()
    failed = verdict(world)
    assert failed.has_rollout_failed
    copies = [worker.models[new] for worker in world.workers.values() if new in worker.models]
    for state in ("fetching", "failed", "loading"):
        for copy in copies:
            copy.state = state
        world.turn()
        assert (verdict(world).rollout_reason, verdict(world).rollout_message) == (
            failed.rollout_reason,
            failed.rollout_message,
        )
    world.edit("m", model={"uri": "pypi://other"})
    assert not verdict(world).has_rollout_failed


def test_a_failed_copy_is_not_asked_for_again() -> None:
    world = world_of()
    world.edit("m", model={"uri": "pypi://bad"})
    world.turn()
    world.advance()
    for _ in range(5):
        world.advance(600)
        assert world.turn().is_empty


def test_a_rollout_past_its_deadline_has_failed_and_still_ends_when_copies_come() -> None:
    world = world_of(rollout={"progressDeadline": "1m"})
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://two"})
    world.turn()
    world.now_s += 61
    found = verdict(world)
    assert (found.has_rollout_failed, found.rollout_reason) == (True, "DeadlineExceeded")
    assert "0 of 1 copies" in found.rollout_message and "60 s" in found.rollout_message
    world.turn()
    world.restart_operator()
    assert verdict(world).rollout_reason == "DeadlineExceeded"
    assert world.target("m") == old
    world.settle()
    assert world.target("m") == revision_of(world, "m") != old


def test_the_clock_going_back_does_not_end_a_rollout() -> None:
    world = world_of(rollout={"progressDeadline": "1m"})
    world.edit("m", model={"uri": "pypi://two"})
    world.turn()
    world.now_s -= 10_000
    assert verdict(world).rollout_reason == "WaitingForCopies"
    world.settle()
    assert verdict(world).rollout_reason == "RolloutComplete"


def test_a_third_revision_abandons_the_second() -> None:
    world = world_of(num_workers=3)
    first = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://bad"})
    second = revision_of(world, "m")
    world.turn()
    world.advance()
    world.now_s += RETIRE_S
    world.edit("m", model={"uri": "pypi://three"})
    third = revision_of(world, "m")
    loads, unloads = steps(world)
    assert [model for _, model in loads] == [third]
    assert [model for _, model in unloads] == [second]
    assert world.target("m") == first
    world.settle()
    assert (world.target("m"), second in world.records) == (third, False)


def test_back_to_the_revision_that_serves_ends_the_rollout_at_once() -> None:
    world = world_of(num_workers=3)
    first = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://bad"})
    second = revision_of(world, "m")
    world.turn()
    world.advance(RETIRE_S)
    world.edit("m", model={"uri": "pypi://one"})
    loads, unloads = steps(world)
    assert (loads, [model for _, model in unloads]) == ([], [second])
    assert verdict(world).rollout_reason == "RolloutComplete"
    world.settle()
    assert (world.target("m"), set(world.records)) == (first, {"m", first})
    numbers = sorted(raw["revision"] for raw in world.revisions.values())
    assert numbers == [1, 2]


def test_a_first_revision_that_never_served_gives_way_at_once() -> None:
    world = World(p_0="p", p_1="p")
    world.apply(raw_model("m", model={"uri": "pypi://bad"}))
    world.settle()
    assert verdict(world).rollout_reason == "RevisionFailed"
    world.edit("m", model={"uri": "pypi://one"})
    world.turn()
    assert world.target("m") == revision_of(world, "m")


def test_recreate_takes_the_old_copies_down_first() -> None:
    world = world_of(num_workers=1, rollout={"strategy": "Recreate"})
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://two"})
    new = revision_of(world, "m")
    assert steps(world) == ([], [("p-0", old)])
    assert verdict(world).rollout_reason == "UnloadingCurrent"
    assert steps(world) == ([], [])  # it drains
    world.advance()
    assert steps(world) == ([("p-0", new)], [])
    assert world.target("m") == new
    world.settle()
    assert set(world.records) == {"m", new}


def test_a_model_on_demand_that_nobody_uses_moves_at_once() -> None:
    world = world_of(residency={"policy": "OnDemand"})
    old = revision_of(world, "m")
    assert world.states(old) == {"p-0": KNOWN, "p-1": KNOWN}
    world.edit("m", model={"uri": "pypi://two"})
    world.turn()
    new = revision_of(world, "m")
    assert (world.target("m"), world.states(new)) == (new, {"p-0": KNOWN, "p-1": KNOWN})
    world.settle()
    assert world.states(old) == {}


@pytest.mark.parametrize("state", ["ready", "loading"])
def test_a_model_on_demand_in_use_moves_when_its_successor_is_loaded(state: str) -> None:
    world = world_of(residency={"policy": "OnDemand"})
    old = revision_of(world, "m")
    world.workers["p-0"].models[old].state = state
    world.edit("m", model={"uri": "pypi://two"})
    new = revision_of(world, "m")
    world.turn()
    assert world.target("m") == old
    assert sorted(world.states(new).values()) == [KNOWN, "loading"]
    world.advance()
    world.turn()
    assert world.target("m") == new


def test_an_emptied_registry_gets_the_revision_that_served_back() -> None:
    world = world_of(num_workers=3)
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://bad"})
    world.turn()
    world.advance()
    world.turn()
    before = dict(world.records)
    world.records.clear()
    world.restart_operator()
    plan = world.turn()
    assert world.target("m") == old
    assert (plan.unload_models, world.records.keys()) == ((), before.keys())
    assert world.records[old].uri == "pypi://one"


def test_an_emptied_registry_is_written_again_in_the_same_generations() -> None:
    world = world_of()
    before = dict(world.records)
    world.records.clear()
    plan = world.turn()
    assert (plan.load_models, plan.unload_models) == ((), ())
    assert world.records == before


def test_the_history_keeps_as_many_earlier_revisions_as_are_asked_for() -> None:
    world = world_of(rollout={"historyLimit": 2})
    for uri in "abcde":
        world.edit("m", model={"uri": f"pypi://{uri}"})
        world.settle()
    assert sorted(raw["revision"] for raw in world.revisions.values()) == [4, 5, 6]
    world.edit("m", rollout={"historyLimit": 0})
    world.settle()
    assert [raw["revision"] for raw in world.revisions.values()] == [6]


def test_an_earlier_revision_whose_object_is_gone_goes_on_until_the_new_one_is_ready() -> None:
    world = world_of(num_workers=3)
    old = revision_of(world, "m")
    world.revisions.clear()
    world.edit("m", model={"uri": "pypi://two"})
    world.restart_operator()
    plan = world.turn()
    assert (world.target("m"), plan.unload_models) == (old, ())
    world.settle()
    assert world.target("m") == revision_of(world, "m")
    assert old not in world.records
