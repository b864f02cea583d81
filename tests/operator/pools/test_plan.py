"""The plan of a pool in single cases: new pools, losses, scale-down, pods of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pool_world import UID, Cluster, change, created, deleted, lease, raw_pool, rolling, running_cluster, timestamp

from naru_operator.core.pools.pool_conflicts import find_pool_conflicts, refused_plan
from naru_proto import names
from naru_proto.crd.v1alpha1 import WorkerPool


def test_a_new_pool_gets_its_pods_in_the_lowest_slots_and_then_rests() -> None:
    cluster = Cluster(raw_pool(workers={"min": 3}))
    assert created(cluster.turn()) == ["p-0", "p-1", "p-2"]
    assert created(cluster.turn()) == []
    cluster.settle()
    plan = cluster.plan()
    assert (plan.create, plan.delete, plan.reasons, plan.problem) == ((), (), (), "")
    assert [item["kind"] for item in plan.apply] == ["PodDisruptionBudget"]


def test_planning_twice_from_one_snapshot_names_the_same_pods() -> None:
    cluster = Cluster(raw_pool(workers={"min": 2}))
    assert cluster.plan() == cluster.plan()


def test_a_pool_of_no_workers_has_no_pods_and_scales_up_again() -> None:
    cluster = running_cluster(2)
    change(cluster, workers={"min": 0})
    assert sorted(deleted(cluster.turn())) == ["p-0", "p-1"]
    cluster.settle()
    assert cluster.pods == {}
    change(cluster, workers={"min": 1})
    cluster.settle()
    assert cluster.ready() == ["p-0"]


def test_at_most_fifty_pods_are_created_in_one_turn() -> None:
    cluster = Cluster(raw_pool(workers={"min": 120}))
    assert [len(cluster.turn().create) for _ in range(4)] == [50, 50, 20, 0]


def test_workers_max_caps_what_an_older_schema_let_through() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}))
    snapshot = cluster.snapshot()
    workers = snapshot.pool.spec.workers.model_copy(update={"min": 5, "max": 2})
    spec = snapshot.pool.spec.model_copy(update={"workers": workers})
    pool = snapshot.pool.model_copy(update={"spec": spec})
    from naru_operator.core.pools.plan import plan_pool

    plan = plan_pool(dataclasses.replace(snapshot, pool=pool), now_s=cluster.now_s)
    assert created(plan) == ["p-0", "p-1"]


def test_a_pool_that_is_being_deleted_gets_no_pod() -> None:
    cluster = Cluster(raw_pool(workers={"min": 2}))
    cluster.raw["metadata"]["deletionTimestamp"] = timestamp(cluster.now_s)
    plan = cluster.plan()
    assert (plan.create, plan.delete, plan.apply) == ((), (), ())


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_terminating_pod_is_replaced_at_once_in_another_slot() -> None:
    cluster = running_cluster(2)
    cluster.terminate("p-0")
    assert created(cluster.turn()) == ["p-2"]
    assert created(cluster.turn()) == []
    cluster.settle()
    assert cluster.ready() == ["p-1", "p-2"]


def test_a_slot_is_free_again_when_its_pod_is_gone() -> None:
    cluster = running_cluster(2)
    cluster.vanish("p-0")
    assert created(cluster.turn()) == ["p-0"]


@pytest.mark.parametrize("word", ["leaving", "draining"])
def test_a_worker_that_was_told_to_end_is_replaced_before_its_pod_terminates(word: str) -> None:
    cluster = running_cluster(2)
    fields: dict[str, Any] = {word: True}
    cluster.leases["p-1"] = lease("p-1", **fields)
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == (["p-1"], ["p-2"])


def test_the_lease_of_a_slots_last_pod_does_not_end_the_new_one() -> None:
    cluster = running_cluster(1)
    cluster.vanish("p-0")
    cluster.leases["p-0"] = lease("p-0", draining=True)
    assert created(cluster.turn()) == ["p-0"]
    plan = cluster.turn()
    assert (created(plan), deleted(plan)) == ([], [])


def test_an_evicted_pod_is_deleted_and_replaced() -> None:
    cluster = running_cluster(2)
    cluster.evict("p-1")
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == (["p-1"], ["p-2"])
    assert plan.problem_reason == "Evicted"
    assert "low on memory" in plan.problem


def test_a_pod_that_fails_at_once_is_not_replaced_in_a_hot_loop() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}))
    cluster.turn()
    cluster.now_s += 2
    cluster.evict("p-0")
    plan = cluster.turn()
    assert (created(plan), deleted(plan)) == ([], [])
    assert plan.problem_reason == "Evicted"
    cluster.now_s += 30
    plan = cluster.turn()
    assert (created(plan), deleted(plan)) == (["p-1"], ["p-0"])


# --- scale-down -----------------------------------------------------------------------------------------------------


def test_scale_down_takes_the_unready_first_then_the_idlest_then_the_emptiest_then_the_youngest() -> None:
    cluster = running_cluster(6)
    cluster.leases["p-0"] = lease("p-0")
    cluster.leases["p-1"] = lease("p-1", num_running=2)
    cluster.leases["p-2"] = lease("p-2", num_running=1, num_waiting=5)
    cluster.leases["p-3"] = lease("p-3", used_bytes=7)
    cluster.leases["p-4"] = lease("p-4")
    cluster.become_unready("p-5")
    order = []
    for num_workers in (5, 4, 3, 2, 1):
        change(cluster, workers={"min": num_workers})
        order += deleted(cluster.turn())
        cluster.vanish(order[-1])
    assert order == ["p-5", "p-4", "p-0", "p-3", "p-1"]


def test_scale_down_takes_a_worker_that_is_not_in_the_route_map_before_one_that_serves() -> None:
    cluster = running_cluster(3)
    del cluster.leases["p-1"]
    change(cluster, workers={"min": 2})
    assert deleted(cluster.turn()) == ["p-1"]


def test_scale_down_in_a_rollout_takes_outdated_pods_first() -> None:
    cluster = rolling(3)
    cluster.turn()
    cluster.become_ready("p-3")
    change(cluster, workers={"min": 1})
    cluster.turn()
    assert "p-3" in cluster.living()
    cluster.settle()
    assert cluster.ready() == ["p-3"]


# --- pods of others -------------------------------------------------------------------------------------------------


def test_a_pod_of_another_owner_is_neither_taken_over_nor_touched() -> None:
    cluster = running_cluster(1)
    cluster.pods["p-0"]["metadata"]["ownerReferences"][0]["uid"] = "another"
    plan = cluster.turn()
    assert (created(plan), deleted(plan)) == (["p-1"], [])
    assert (plan.problem_reason, plan.problem_worker) == ("NameConflict", "p-0")
    cluster.settle()
    assert set(cluster.pods) == {"p-0", "p-1"}


def test_a_name_that_is_taken_by_an_unlabelled_pod_is_skipped_and_told() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}), taken_names=frozenset({"p-0", "unrelated-7"}))
    plan = cluster.plan()
    assert created(plan) == ["p-1"]
    assert (plan.problem_reason, plan.problem_worker) == ("NameConflict", "p-0")


def test_a_pod_whose_slot_label_was_edited_is_replaced_like_an_outdated_one() -> None:
    cluster = running_cluster(2)
    cluster.pods["p-1"]["metadata"]["labels"][names.LABEL_SLOT] = "0"
    cluster.settle()
    assert cluster.ready() == ["p-0", "p-2"]


def test_pools_of_one_name_go_to_the_oldest() -> None:
    def pool(namespace: str, created_s: float) -> WorkerPool:
        raw = raw_pool("gpu")
        raw["metadata"] |= {"namespace": namespace, "creationTimestamp": timestamp(created_s)}
        return WorkerPool.model_validate(raw)

    conflicts = find_pool_conflicts([pool("a", 20.0), pool("b", 10.0), pool("c", 10.0)])
    assert {str(key): "namespace 'b'" in why for key, why in conflicts.items()} == {"a/gpu": True, "c/gpu": True}
    plan = refused_plan("NameConflict", "why")
    assert (plan.is_accepted, plan.problem_reason, plan.create) == (False, "NameConflict", ())


def test_objects_belong_to_the_pool() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}, cache={"storageClassName": "c", "size": "1Gi"}))
    plan = cluster.plan()
    for item in (*plan.apply, *plan.create):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("WorkerPool", UID, True)
        assert item["metadata"]["namespace"] == "ns"
