"""What the plan says is wrong when a pool does not come to what is asked."""

from __future__ import annotations

import pytest
from pool_world import Cluster, change, created, deleted, lease, raw_pool, rolling, running_cluster


def test_what_the_scheduler_says_is_the_problem() -> None:
    cluster = Cluster(raw_pool(workers={"min": 2}, accelerator={"kind": "cuda"}))
    cluster.turn()
    for name in ("p-0", "p-1"):
        cluster.be_unschedulable(name, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    plan = cluster.plan()
    assert plan.problem_reason == "Unschedulable"
    assert "3 Insufficient nvidia.com/gpu" in plan.problem
    assert "1 more" in plan.problem


def test_a_volume_of_a_class_that_does_not_exist_is_told_by_the_class() -> None:
    cache = {"storageClassName": "nope", "size": "5Gi"}
    cluster = Cluster(raw_pool(workers={"min": 1}, cache=cache))
    assert [item["kind"] for item in cluster.turn().apply] == ["PodDisruptionBudget", "PersistentVolumeClaim"]
    assert [item["kind"] for item in cluster.turn().apply] == ["PodDisruptionBudget"]
    cluster.be_unschedulable("p-0", 'storageclass.storage.k8s.io "nope" not found', reason="SchedulerError")
    plan = cluster.plan()
    assert plan.problem_reason == "StorageNotReady"
    assert "class 'nope'" in plan.problem
    assert plan.storage_problem == plan.problem
    cluster.claims = dict.fromkeys(cluster.claims, "Bound")
    cluster.become_ready("p-0")
    assert (cluster.plan().problem, cluster.plan().storage_problem) == ("", "")


def test_a_claim_that_waits_for_its_first_pod_is_no_storage_problem() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}, cache={"storageClassName": "late", "size": "5Gi"}))
    cluster.turn()
    cluster.be_unschedulable("p-0", "0/1 nodes are available: 1 Insufficient cpu.")
    assert cluster.plan().problem_reason == "Unschedulable"


def test_another_storage_class_makes_other_claims() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}, cache={"storageClassName": "nope", "size": "5Gi"}))
    cluster.turn()
    change(cluster, cache={"storageClassName": "good", "size": "5Gi"})
    cluster.settle()
    (pod,) = cluster.pods.values()
    (claim,) = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if v["name"] == "cache"]
    assert len(cluster.claims) >= 2
    assert claim in cluster.claims


@pytest.mark.parametrize(
    ("claims", "said"),
    [({}, "does not exist"), ({"weights": "Lost"}, "lost its volume"), ({"weights": "Bound"}, "")],
)
def test_a_missing_or_lost_claim_of_models_is_a_storage_problem(claims: dict[str, str], said: str) -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}, claims=["weights"]), claims=claims)
    plan = cluster.plan()
    assert (plan.problem_reason == "StorageNotReady") == bool(said)
    assert said in plan.problem
    assert created(plan) == ["p-0"]


@pytest.mark.parametrize(
    ("waiting", "age_s", "reason"),
    [
        ({"reason": "ContainerCreating"}, 10, ""),
        ({"reason": "ContainerCreating"}, 61, "ContainerCreating"),
        ({"reason": "CreateContainerConfigError", "message": 'secret "naru-redis" not found'}, 1,
         "CreateContainerConfigError"),
        (None, 60, ""),
        (None, 200, "NotReady"),
    ],
)  # fmt: skip
def test_a_pod_that_does_not_start_is_told_when_it_takes_too_long(
    waiting: dict[str, str] | None, age_s: float, reason: str
) -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}))
    cluster.turn()
    cluster.become_unready("p-0", waiting)
    cluster.now_s += age_s
    plan = cluster.plan()
    assert plan.problem_reason == reason
    assert waiting is None or waiting.get("message", "") in plan.problem or not reason


def test_a_worker_that_is_missing_from_the_route_map_is_told_with_the_secret() -> None:
    cluster = running_cluster(1)
    cluster.leases.clear()
    cluster.now_s += 100
    plan = cluster.plan()
    assert plan.problem_reason == "NotRegistered"
    assert "'naru-redis'" in plan.problem
    assert (plan.create, plan.delete) == ((), ())


def test_leases_of_another_pool_do_not_make_a_worker_ready() -> None:
    cluster = rolling(1)
    cluster.turn()
    cluster.become_ready("p-1")
    cluster.leases["p-1"] = lease("p-1", pool="other")
    assert deleted(cluster.turn()) == []
