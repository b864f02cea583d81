"""What manifests say of requests stands in the registry, in a cluster and in `naru up`, and loads nothing anew."""

from __future__ import annotations

from typing import Any

from model_world import KEY, World, raw_model, world_of

from naru_operator.core.desired import desired_state
from naru_operator.core.local_plan import Snapshot, plan
from naru_operator.core.traffic import Traffic, traffic_in, traffic_of
from naru_proto.crd.v1alpha1 import ModelDeployment

SPEC: dict[str, Any] = {
    "routing": {
        "strategy": "RoundRobin",
        "loadFactor": 2.0,
        "maxRetries": 3,
        "split": [{"model": "m", "weight": 90}, {"model": "n", "weight": 10}],
        "fallbacks": ["n"],
    },
    "tenancy": {"allow": ["a", "b"], "cacheIsolation": "AfterSystem"},
}
SAID = Traffic("round_robin", 2.0, 3, ("a", "b"), "after_system", ("n",), (("m", 90), ("n", 10)), 60.0, 256)
DEFAULT = Traffic(max_wait_s=60.0, max_depth=256)


def test_a_manifest_that_says_nothing_leaves_all_to_the_router() -> None:
    assert traffic_of(ModelDeployment.model_validate(raw_model("m")).spec) == DEFAULT


def test_entries_and_revisions_say_it_and_a_change_is_no_rollout() -> None:
    world = world_of()
    revision, entry = world.records[world.target("m")], world.records["m"]
    assert traffic_in(entry) == traffic_in(revision) == DEFAULT
    world.edit("m", **SPEC)
    steps = world.turn()
    assert (steps.load_models, steps.unload_models) == ((), ())
    assert world.records["m"].target == entry.target
    for record in (world.records["m"], world.records[entry.target]):
        assert traffic_in(record) == SAID
    assert world.plan().is_empty


def test_a_refused_or_unreadable_spec_changes_nothing_of_who_may_ask() -> None:
    world = world_of(**SPEC)
    world.edit("m", tenancy={}, adapters=[{"name": "l", "uri": "hf://o/l"}])
    world.settle()
    assert world.plan().verdicts[KEY].reason == "UnsupportedField"
    assert traffic_in(world.records["m"]) == SAID
    world.invalid[KEY] = "spec.tenancy: bad"
    world.settle()
    assert traffic_in(world.records["m"]) == SAID


def test_on_one_machine_a_change_of_it_is_written_and_nothing_is_loaded_again() -> None:
    def snapshot(done: Snapshot | None, **spec: Any) -> Snapshot:
        desired = desired_state([ModelDeployment.model_validate(raw_model("m", **spec))], num_cores=2)
        if done is None:
            return Snapshot(desired, (), {}, {})
        before = plan(done, now_s=1)
        return Snapshot(desired, (), {record.name: record for record in before.put_records}, before.applied)

    first = snapshot(None)
    steps = plan(snapshot(first, **SPEC), now_s=2)
    (record,) = steps.put_records
    assert (record.generation, traffic_in(record)) == (1, SAID)
    assert traffic_in(plan(first, now_s=1).put_records[0]) == DEFAULT


def test_a_world_with_splits_and_fallbacks_comes_to_rest() -> None:
    world = World(p_0="p", p_1="p")
    world.apply(raw_model("m", **SPEC))
    world.apply(raw_model("n", residency={"policy": "OnDemand"}, routing={"fallbacks": ["m"]}))
    world.settle()
    assert world.plan().is_empty
