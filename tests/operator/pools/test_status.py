"""What a pool's status tells, and that it is told again only when something of note has happened."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_world import START_S, Cluster, change, held, lease, raw_pool, running_cluster, timestamp

from naru_operator.core.pools.plan import plan_pool
from naru_operator.core.pools.pool_conflicts import refused_plan
from naru_operator.core.pools.status import USED_STEP_RATIO, pool_status
from naru_proto.crd.metadata import Condition
from naru_proto.crd.worker_pool import MAX_MEMBERS, WorkerPoolStatus

GIB = 1 << 30


def told(cluster: Cluster, previous: WorkerPoolStatus | None = None) -> WorkerPoolStatus:
    """The status now, as it comes back from the API server."""
    snapshot = cluster.snapshot()
    plan = plan_pool(snapshot, now_s=cluster.now_s)
    status = pool_status(snapshot, plan, previous or WorkerPoolStatus(), now_s=cluster.now_s)
    read_back = WorkerPoolStatus.model_validate(status.to_wire())
    assert read_back == status
    return read_back


def condition(status: WorkerPoolStatus, kind: str) -> Condition:
    (found,) = [each for each in status.conditions if each.type == kind]
    return found


def words(status: WorkerPoolStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in status.conditions}


def test_a_ready_pool_tells_its_members_and_their_sums() -> None:
    cluster = running_cluster(2)
    models = {"a@1": held(), "b@1": held("active"), "c@1": held("host"), "d@1": held("loading"), "e@1": held("cold")}
    cluster.leases["p-1"] = lease("p-1", budget_bytes=4 * GIB, used_bytes=GIB, models=models)
    cluster.leases["p-0"] = lease("p-0", budget_bytes=4 * GIB, used_bytes=0)
    status = told(cluster)
    assert (status.phase, status.observed_generation) == ("Ready", 3)
    assert status.selector == "serving.naru.dev/pool=p"
    assert (status.workers.desired, status.workers.ready, status.workers.draining) == (2, 2, 0)
    assert (status.budget_bytes, status.used_bytes) == (8 * GIB, GIB)
    assert [member.to_wire() for member in status.members] == [
        {
            "worker": name,
            "node": "n0",
            "ready": True,
            "draining": False,
            "budgetBytes": 4 * GIB,
            "usedBytes": used_bytes,
            "numModels": num_models,
        }
        for name, used_bytes, num_models in (("p-0", 0, 0), ("p-1", GIB, 2))
    ]
    assert words(status) == {
        "Accepted": ("True", "Accepted"),
        "Ready": ("True", "WorkersReady"),
        "Progressing": ("True", "RolloutComplete"),
        "StorageReady": ("True", "NoClaims"),
    }
    assert condition(status, "Ready").observed_generation == 3
    assert status.last_error is None


def test_a_pool_that_starts_is_pending_then_scaling_then_ready() -> None:
    cluster = Cluster(raw_pool(workers={"min": 2}))
    seen = [told(cluster)]
    cluster.turn()
    for name in ("p-0", "p-1"):
        cluster.become_ready(name)
        seen.append(told(cluster, seen[-1]))
    assert [status.phase for status in seen] == ["Pending", "Scaling", "Ready"]
    assert [words(status)["Ready"] for status in seen] == [
        ("False", "WorkersNotReady"), ("False", "WorkersNotReady"), ("True", "WorkersReady"),
    ]  # fmt: skip
    assert condition(seen[1], "Ready").message == "1 of 2 workers are ready"


def test_a_lost_worker_makes_a_ready_pool_degraded_and_more_wanted_ones_make_it_scale() -> None:
    cluster = running_cluster(2)
    before = told(cluster)
    cluster.terminate("p-1")
    lost = told(cluster, before)
    assert (lost.phase, lost.workers.ready, lost.workers.draining) == ("Degraded", 1, 1)
    assert [(member.worker, member.draining) for member in lost.members] == [("p-0", False), ("p-1", True)]
    cluster.settle()
    change(cluster, workers={"min": 4})
    assert told(cluster, before).phase == "Scaling"


def test_a_rollout_is_told_while_all_workers_stay_ready() -> None:
    cluster = running_cluster(2, image="a")
    change(cluster, image="b")
    cluster.turn()
    status = told(cluster, told(running_cluster(2, image="a")))
    assert (status.phase, status.workers.ready) == ("Scaling", 2)
    assert words(status)["Progressing"] == ("True", "RollingOut")
    assert words(status)["Ready"][0] == "True"


def test_a_stuck_rollout_is_degraded_with_the_old_workers_ready() -> None:
    cluster = running_cluster(2, image="a")
    change(cluster, image="b")
    cluster.turn()
    cluster.become_unready("p-2", {"reason": "ErrImagePull", "message": "b not found"})
    cluster.now_s += 400
    status = told(cluster)
    assert status.phase == "Degraded"
    assert words(status)["Progressing"] == ("False", "RolloutStuck")
    assert words(status)["Ready"][0] == "True"
    assert status.last_error is not None
    assert (status.last_error.code, status.last_error.worker) == ("rollout_stuck", "p-2")
    assert "b not found" in condition(status, "Progressing").message


@pytest.mark.parametrize(
    ("waiting", "phase", "code"),
    [
        ({"reason": "ErrImagePull", "message": "gone"}, "Failed", "image_pull_back_off"),
        (None, "Pending", "unschedulable"),
    ],
)
def test_trouble_of_all_workers_is_the_pools_last_error_until_it_is_ready(
    waiting: dict[str, str] | None, phase: str, code: str
) -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}))
    cluster.turn()
    if waiting:
        cluster.become_unready("p-0", waiting)
    else:
        cluster.be_unschedulable("p-0", "0/1 nodes are available: 1 Insufficient cpu.")
    status = told(cluster)
    assert status.last_error is not None
    assert (status.phase, status.last_error.code) == (phase, code)
    assert words(status)["Ready"] == ("False", condition(status, "Progressing").reason)
    cluster.become_unready("p-0")
    cluster.now_s += 5
    between = told(cluster, status)
    assert between.last_error == status.last_error
    cluster.become_ready("p-0")
    assert told(cluster, between).last_error is None


def test_storage_has_a_condition_of_its_own() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}, cache={"storageClassName": "nope", "size": "1Gi"}))
    cluster.turn()
    assert words(told(cluster))["StorageReady"] == ("Unknown", "NotBoundYet")
    cluster.be_unschedulable("p-0", 'storageclass.storage.k8s.io "nope" not found', reason="SchedulerError")
    missing = told(cluster)
    assert (missing.phase, words(missing)["StorageReady"]) == ("Pending", ("False", "StorageNotReady"))
    assert "'nope'" in condition(missing, "StorageReady").message
    cluster.claims = dict.fromkeys(cluster.claims, "Bound")
    cluster.become_ready("p-0")
    assert words(told(cluster, missing))["StorageReady"] == ("True", "ClaimsBound")


def test_a_pool_of_no_workers_is_ready_once_the_last_has_gone() -> None:
    cluster = running_cluster(1)
    change(cluster, workers={"min": 0})
    cluster.turn()
    assert told(cluster).phase == "Draining"
    cluster.vanish("p-0")
    status = told(cluster)
    assert (status.phase, words(status)["Ready"], status.members) == ("Ready", ("True", "NoWorkersAsked"), ())
    assert (status.budget_bytes, status.used_bytes) == (None, None)


def test_a_refused_pool_is_not_accepted_and_has_failed() -> None:
    cluster = Cluster(raw_pool())
    plan = refused_plan("NameConflict", "namespace 'a' has an older pool 'p'")
    status = pool_status(cluster.snapshot(), plan, WorkerPoolStatus(), now_s=cluster.now_s)
    assert (status.phase, words(status)["Accepted"]) == ("Failed", ("False", "NameConflict"))
    assert words(status)["Ready"] == ("False", "NameConflict")
    assert condition(status, "Accepted").message == "namespace 'a' has an older pool 'p'"


def test_a_pool_that_goes_is_draining() -> None:
    cluster = running_cluster(1)
    cluster.raw["metadata"]["deletionTimestamp"] = timestamp(cluster.now_s)
    status = told(cluster)
    assert (status.phase, words(status)["Ready"]) == ("Draining", ("False", "Deleted"))


# --- quiet ----------------------------------------------------------------------------------------------------------


def test_the_same_facts_later_give_the_same_status() -> None:
    cluster = running_cluster(3)
    before = told(cluster)
    for _ in range(3):
        cluster.now_s += 977.3
        assert told(cluster, before) == before


def test_a_pool_in_lasting_trouble_gives_the_same_status() -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}))
    cluster.turn()
    cluster.become_unready("p-0", {"reason": "ErrImagePull", "message": "gone"})
    before = told(cluster)
    cluster.now_s += 5000
    cluster.become_unready("p-0", {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x": gone'})
    assert told(cluster, before) == before


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    cluster = running_cluster(1)
    ready = told(cluster)
    cluster.terminate("p-0")
    cluster.now_s += 100
    lost = told(cluster, ready)
    assert condition(lost, "Ready").last_transition_time.timestamp() == int(cluster.now_s)
    assert condition(lost, "Accepted") == condition(ready, "Accepted")
    cluster.now_s += 100
    cluster.turn()
    cluster.be_unschedulable("p-1", "0/1 nodes are available: 1 Insufficient cpu.")
    cluster.vanish("p-0")
    later = condition(told(cluster, lost), "Ready")
    assert (later.reason, later.last_transition_time) == (
        "Unschedulable",
        condition(lost, "Ready").last_transition_time,
    )


@given(moves=st.lists(st.integers(0, 4 * GIB), min_size=1, max_size=12))
def test_memory_in_use_is_told_again_only_after_a_step_and_never_far_off(moves: list[int]) -> None:
    cluster = Cluster(raw_pool(workers={"min": 1}), now_s=START_S)
    cluster.turn()
    cluster.become_ready("p-0")
    status = told(cluster)
    step_bytes = 4 * GIB * USED_STEP_RATIO
    for used_bytes in moves:
        cluster.leases["p-0"] = lease("p-0", budget_bytes=4 * GIB, used_bytes=used_bytes)
        before, status = status, told(cluster, status)
        (member,) = status.members
        assert member.used_bytes is not None
        assert member.used_bytes == status.used_bytes
        assert abs(member.used_bytes - used_bytes) < step_bytes
        if used_bytes == 0:
            assert member.used_bytes == 0
        elif before.members[0].used_bytes and abs(before.members[0].used_bytes - used_bytes) < step_bytes:
            assert member.used_bytes == before.members[0].used_bytes


def test_a_large_pool_lists_256_members_and_counts_all() -> None:
    cluster = running_cluster(MAX_MEMBERS + 4)
    cluster.leases = {name: dataclasses.replace(each, used_bytes=GIB // 2) for name, each in cluster.leases.items()}
    status = told(cluster)
    assert (len(status.members), status.workers.ready) == (MAX_MEMBERS, MAX_MEMBERS + 4)
    assert status.used_bytes == (MAX_MEMBERS + 4) * GIB // 2
    unlisted = sorted(cluster.leases)[-1]
    cluster.leases[unlisted] = dataclasses.replace(cluster.leases[unlisted], used_bytes=GIB // 2 + 1)
    assert told(cluster, status) == status
