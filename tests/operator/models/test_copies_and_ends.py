"""What becomes of a model's copies: on workers that leave, at deletion, while scaling, after a restart."""

from __future__ import annotations

import pytest
from model_world import KEY, Held, Worker, World, raw_model, raw_pool, revision_of, steps, verdict, world_of

from naru_operator.core.kube import ObjectKey
from naru_operator.core.model_plan import EVICTED
from naru_proto import names
from naru_proto.crd.v1alpha1 import ModelDeploymentStatus


def test_a_refused_change_leaves_the_old_revision_as_it_is() -> None:
    world = world_of(alias="x")
    old = revision_of(world, "m")
    world.edit("m", model={"uri": "pypi://two"}, alias="x", adapters=[{"name": "l", "uri": "hf://o/l"}])
    plan = world.turn()
    assert plan.is_empty, plan.reasons
    found = verdict(world)
    assert (found.is_accepted, found.reason, found.rollout_reason) == (False, "UnsupportedField", "NotAccepted")
    assert found.current == old.partition("@")[2] != found.update
    # A lost worker's copy comes back: the old revision is still wanted.
    for worker in world.workers.values():
        worker.models.clear()
    assert [load.uri for load in world.turn().load_models] == ["pypi://one"]


def test_what_served_before_an_object_became_unreadable_stays() -> None:
    world = world_of(alias="x")
    before = dict(world.records)
    world.invalid[KEY] = "spec.model.uri: bad"
    for _ in range(5):
        world.advance(10)
        assert world.turn().is_empty
    assert world.records == before
    found = verdict(world)
    assert (found.is_accepted, found.reason) == (False, "InvalidSpec")
    assert "spec.model.uri: bad" in found.message
    world.records.clear()
    world.restart_operator()
    world.advance(10)
    assert world.turn().unload_models == ()


def test_a_deleted_model_is_forgotten_and_unloaded() -> None:
    world = world_of()
    name = revision_of(world, "m")
    world.delete(KEY)
    plan = world.turn()
    assert plan.delete_records == ("m",)
    assert [unload.model for unload in plan.unload_models] == [name]
    world.settle()
    assert (world.records, world.states(name)) == ({}, {})


def test_a_model_that_is_being_deleted_is_treated_as_gone() -> None:
    world = world_of()
    world.objects[KEY]["metadata"]["deletionTimestamp"] = "2025-01-01T00:00:00Z"
    plan = world.turn()
    assert (plan.delete_records, plan.verdicts, plan.create_revisions) == (("m",), {}, ())


# --- workers that leave, and copies that move -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["Preferred", "OnDemand"])
def test_what_is_ready_on_a_leaving_worker_comes_up_on_a_staying_one(policy: str) -> None:
    world = world_of(num_workers=2, residency={"policy": policy})
    name = revision_of(world, "m")
    if policy == "OnDemand":
        world.workers["p-0"].models[name].state = "ready"
    (worker_id,) = world.ready_on(name)
    world.workers[worker_id].leaving = True
    loads, unloads = steps(world)
    other = "p-1" if worker_id == "p-0" else "p-0"
    assert (loads, unloads) == ([(other, name)], [])
    world.advance()
    assert world.ready_on(name) == ["p-0", "p-1"]
    assert steps(world) == ([], [])
    del world.workers[worker_id]
    world.settle()
    assert world.ready_on(name) == [other]


def test_a_copy_that_was_evicted_comes_back_when_the_last_ready_one_leaves() -> None:
    world = world_of(num_workers=2, replicas={"min": 2})
    name = revision_of(world, "m")
    world.workers["p-0"].models[name].state = EVICTED
    assert world.turn().is_empty
    world.workers["p-1"].leaving = True
    assert steps(world)[0] == [("p-0", name)]


def test_with_no_worker_that_stays_nothing_is_planned() -> None:
    world = world_of(num_workers=1)
    world.workers["p-0"].leaving = True
    world.edit("m", model={"uri": "pypi://two"})
    assert steps(world) == ([], [])
    found = verdict(world)
    assert (found.rollout_reason, found.placed_on) == ("WaitingForWorkers", ())
    world.workers["p-9"] = Worker("p")
    assert len(steps(world)[0]) == 2


def test_copies_stay_in_a_pool_that_no_longer_fits_until_others_serve() -> None:
    world = World(raw_pool("p"), raw_pool("q", {"tier": "q"}), p_0="p", q_0="q")
    world.apply(raw_model("m", placement={"poolSelector": {"matchLabels": {}}}))
    world.settle()
    name = revision_of(world, "m")
    (before,) = world.ready_on(name)
    assert before == "p-0"
    world.edit("m", placement={"poolSelector": {"matchLabels": {"tier": "q"}}})
    assert steps(world) == ([("q-0", name)], [])
    assert steps(world) == ([], [])
    world.advance()
    assert steps(world) == ([], [("p-0", name)])


def test_scaling_up_adds_workers_and_scaling_down_takes_the_idlest_copies() -> None:
    world = world_of(num_workers=4)
    name = revision_of(world, "m")
    world.edit("m", replicas={"min": 3})
    loads, unloads = steps(world)
    assert (len(loads), unloads) == (2, [])
    world.settle()
    assert len(world.ready_on(name)) == 3
    busy, used, idle = world.ready_on(name)
    world.workers[busy].models[name].in_flight = 2
    world.workers[used].models[name].last_used_s = 5
    world.edit("m", replicas={"min": 2})
    assert steps(world) == ([], [(idle, name)])
    world.settle()
    world.edit("m", replicas={"min": 1})
    assert steps(world) == ([], [(used, name)])


def test_scaled_to_nothing_a_model_waits_for_a_request_and_stays_known() -> None:
    world = world_of(num_workers=2)
    name = revision_of(world, "m")
    world.edit("m", replicas={"min": 0})
    plan = world.turn()
    assert {load.worker_id for load in plan.load_models} == {"p-0", "p-1"}
    assert {load.residency.tier.value for load in plan.load_models} == {"cold"}
    assert {load.residency.idle_ttl_s for load in plan.load_models} == {0.0}
    assert (world.records["m"].on_demand, world.records[name].on_demand) == (True, True)
    world.edit("m", replicas={"min": 1})
    (load,) = world.turn().load_models
    assert load.residency.tier.value == "active"


def test_a_model_goes_where_it_fits_with_the_least_room_left() -> None:
    world = World(p_0="p", p_1="p", p_2="p")
    for worker_id, budget in (("p-0", 100), ("p-1", 12), ("p-2", 9)):
        world.workers[worker_id].budget_bytes = budget
    world.apply(raw_model("m"))
    name = revision_of(world, "m")
    world.workers["p-0"].leaving = True
    world.workers["p-0"].models[name] = Held("ready", 1, "pypi://m")
    assert steps(world)[0] == [("p-1", name)]


def test_credentials_and_limits_reach_the_worker() -> None:
    world = World(raw_pool("p", credentialSecrets=["token"]), p_0="p")
    source = {"uri": "hf://o/m", "revision": "v1", "credentialsSecret": "token"}
    world.apply(raw_model("m", model=source, engine={"maxModelLen": 9}))
    (load,) = world.turn().load_models
    assert (load.uri, load.revision, load.credentials, load.limits.max_model_len) == ("hf://o/m", "v1", "token", 9)


def test_unloads_give_running_requests_the_pools_drain_time() -> None:
    world = World(raw_pool("p", drainTimeout="7s"), p_0="p")
    key = world.apply(raw_model("m"))
    world.settle()
    world.delete(key)
    (unload,) = world.turn().unload_models
    assert unload.drain_timeout_s == 7.0


def test_a_restarted_operator_with_a_full_registry_plans_nothing() -> None:
    world = world_of(num_workers=2, residency={"policy": "OnDemand"}, alias="x")
    world.restart_operator()
    assert world.plan().is_empty


def test_a_refused_generation_is_passed() -> None:
    world = world_of()
    name = revision_of(world, "m")
    (worker_id,) = world.ready_on(name)
    world.workers[worker_id].models[name].state = "failed"
    world.refused[name] = 9
    (load,) = world.turn().load_models
    assert (load.generation, world.records[name].generation) == (10, 10)


def test_a_revision_object_of_that_name_that_is_not_ours_is_left_alone() -> None:
    world = World(p_0="p")
    world.apply(raw_model("m"))
    digest = revision_of(world, "m").partition("@")[2]
    foreign = {"metadata": {"namespace": "default", "name": f"m-{digest}"}, "revision": 1, "data": {}}
    world.revisions[ObjectKey("default", f"m-{digest}")] = foreign
    assert world.turn().create_revisions == ()
    assert foreign in world.revisions.values()


def test_an_entry_keeps_its_count_while_nothing_of_it_changes() -> None:
    world = world_of()
    assert world.records["m"].generation == 1
    world.edit("m", alias="x")
    world.settle()
    assert world.records["m"].generation == 2


def test_names_of_full_length_are_registered() -> None:
    name = ("a" * 60 + ".") * 4 + "b" * 9
    world = World(p_0="p")
    world.apply(raw_model(name, model={"uri": "pypi://m"}))
    world.settle()
    ((place, raw),) = world.revisions.items()
    assert len(place.name) <= 253 and len(raw["metadata"]["labels"][names.LABEL_MODEL]) <= 63
    assert world.records[name].target == revision_of(world, name)


def test_a_status_that_was_never_written_is_no_reason_to_move_back() -> None:
    world = world_of(num_workers=3)
    world.edit("m", model={"uri": "pypi://two"})
    world.settle()
    world.statuses[KEY] = ModelDeploymentStatus()
    world.restart_operator()
    world.turn()
    assert world.target("m") == revision_of(world, "m")
