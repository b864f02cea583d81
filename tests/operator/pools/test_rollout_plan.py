"""Rollouts of a pool: one after another, never too few ready, and stopped by a revision that does not come up."""

from __future__ import annotations

import pytest
from pool_world import Cluster, change, created, deleted, lease, rolling, running_cluster


def test_a_rollout_brings_up_one_more_and_then_deletes_the_idlest_outdated_pod() -> None:
    cluster = rolling(2)
    cluster.leases["p-0"] = lease("p-0", num_running=1)
    plan = cluster.turn()
    assert (created(plan), deleted(plan)) == (["p-2"], [])
    assert cluster.turn().create == ()
    cluster.become_ready("p-2")
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == (["p-1"], ["p-3"])
    cluster.settle()
    assert all(pod["spec"]["containers"][0]["image"] == "naru/worker:b" for pod in cluster.pods.values())
    assert len(cluster.ready()) == 2


def test_without_surge_one_worker_leaves_before_its_successor_starts() -> None:
    cluster = rolling(2, maxSurge=0)
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == (["p-1"], ["p-2"])
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == ([], [])
    cluster.be_unschedulable("p-2", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    assert cluster.plan().problem == "", "its predecessor still has the room"
    cluster.vanish("p-1")
    assert cluster.plan().problem_reason == "Unschedulable"
    cluster.become_ready("p-2")
    plan = cluster.turn()
    assert (deleted(plan), created(plan)) == (["p-0"], ["p-1"])


def test_a_larger_surge_rolls_that_many_at_once() -> None:
    cluster = rolling(4, maxSurge=2)
    assert len(cluster.turn().create) == 2
    for name in ("p-4", "p-5"):
        cluster.become_ready(name)
    plan = cluster.turn()
    assert (len(plan.delete), len(plan.create)) == (2, 2)


def test_an_outdated_pod_that_is_not_ready_is_replaced_at_once() -> None:
    cluster = running_cluster(2, image="naru/worker:a")
    cluster.become_unready("p-0")
    change(cluster, image="naru/worker:b")
    plan = cluster.turn()
    assert deleted(plan) == ["p-0"]
    assert created(plan) == ["p-2", "p-3"]


def test_losing_the_route_map_in_a_rollout_deletes_nobody() -> None:
    cluster = rolling(3)
    cluster.turn()
    cluster.become_ready("p-3")
    cluster.has_registry = False
    for _ in range(5):
        assert deleted(cluster.turn()) == []
    cluster.has_registry = True
    assert len(deleted(cluster.turn())) == 1


def test_workers_that_never_registered_are_rolled_over_by_one_that_does() -> None:
    cluster = running_cluster(3, image="naru/worker:a")
    cluster.leases.clear()
    change(cluster, image="naru/worker:b")
    assert created(cluster.turn()) == ["p-3"]
    cluster.become_ready("p-3")
    plan = cluster.turn()
    assert sorted(deleted(plan)) == ["p-0", "p-1", "p-2"]
    assert len(plan.create) == 2


def test_a_revision_that_does_not_become_ready_stops_the_rollout_with_the_reason() -> None:
    cluster = rolling(2, maxSurge=2)
    cluster.turn()
    cluster.become_ready("p-2")
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "naru/worker:b": not found'}
    cluster.become_unready("p-3", waiting)
    assert len(deleted(cluster.turn())) == 1, "one new worker is ready"
    cluster.now_s += 301
    for _ in range(3):
        plan = cluster.turn()
        assert (created(plan), deleted(plan)) == ([], [])
    assert (plan.problem_reason, plan.problem_worker) == ("RolloutStuck", "p-3")
    assert "ImagePullBackOff: not found" in plan.problem


def stuck_rollout() -> Cluster:
    """Four old workers, a new one that is ready, and one whose image cannot be had, for long."""
    cluster = rolling(4, maxSurge=3)
    cluster.turn()
    cluster.become_ready("p-4")
    cluster.become_unready("p-5", {"reason": "ErrImagePull", "message": "not found"})
    cluster.vanish("p-6")
    cluster.now_s += 301
    return cluster


def test_a_stuck_rollout_brings_up_no_more_and_takes_no_old_worker_though_one_could_go() -> None:
    cluster = stuck_rollout()
    plan = cluster.turn()
    assert (created(plan), deleted(plan), plan.problem_reason) == ([], [], "RolloutStuck")
    cluster.become_unready("p-0")
    assert deleted(cluster.turn()) == [], "it may recover, and the new revision is bad"


def test_a_stuck_rollout_goes_on_when_its_worker_gets_ready_after_all() -> None:
    cluster = stuck_rollout()
    cluster.turn()
    cluster.become_ready("p-5")
    assert len(deleted(cluster.turn())) == 2
    cluster.settle()
    assert len(cluster.ready()) == 4


def test_a_stuck_pool_still_replaces_lost_workers_up_to_what_is_asked() -> None:
    cluster = stuck_rollout()
    for name in ("p-0", "p-1", "p-2"):
        cluster.vanish(name)
    assert created(cluster.turn()) == ["p-0"]


def test_a_silent_revision_is_stuck_after_the_progress_deadline_alone() -> None:
    cluster = rolling(1, progressDeadline="10m")
    cluster.turn()
    cluster.be_unschedulable("p-1", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    cluster.now_s += 599
    assert cluster.turn().problem_reason == "Unschedulable"
    cluster.now_s += 1
    plan = cluster.turn()
    assert plan.problem_reason == "RolloutStuck"
    assert "Insufficient nvidia.com/gpu" in plan.problem
    assert "maxSurge: 0" in plan.problem
    assert cluster.living() == ["p-0", "p-1"]


@pytest.mark.parametrize("max_surge", [0, 1, 2])
def test_taking_a_stuck_change_back_deletes_the_new_pods_and_keeps_the_old(max_surge: int) -> None:
    cluster = rolling(3, maxSurge=max_surge)
    old = set(cluster.ready())
    cluster.turn()
    for name in set(cluster.living()) - old:
        cluster.become_unready(name, {"reason": "ErrImagePull", "message": "not found"})
    cluster.now_s += 2000
    assert cluster.turn().problem_reason == "RolloutStuck"
    survivors = set(cluster.ready())
    change(cluster, image="naru/worker:a")
    plan = cluster.turn()
    assert set(deleted(plan)).isdisjoint(survivors)
    assert len(plan.delete) == max(1, max_surge)
    cluster.settle()
    assert survivors <= set(cluster.ready())
    assert len(cluster.ready()) == 3
