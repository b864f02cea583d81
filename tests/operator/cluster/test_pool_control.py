"""WorkerPools through whole turns: pods, refusals, names that are taken, statuses."""

from __future__ import annotations

import logging

import pytest
from cluster_rig import NAMESPACE, OTHER_NAMESPACE, ClusterRig, condition, key, pool

from naru_operator.adapters.kube.errors import ApiAway, Denied, Forbidden
from naru_operator.core.kube import Object, ObjectKey
from naru_proto import names


def foreign_pod(name: str) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": {}}


async def test_a_pool_becomes_its_pods_and_then_nothing_is_written(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.converge()
    assert list(rig.kube.named("Pod")) == ["default-0", "default-1"]
    assert list(rig.kube.named("PodDisruptionBudget")) == ["default-workers"]
    for name in ("default-0", "default-1"):
        await rig.start_worker(name)
    await rig.converge()
    assert rig.phase("WorkerPool", "default") == "Ready"
    assert rig.get("WorkerPool", "default")["status"]["workers"] == {"desired": 2, "ready": 2, "draining": 0}
    before = len(rig.kube.asked)
    await rig.turn(3)
    assert len(rig.kube.asked) == before


async def test_a_watch_that_lags_makes_no_pod_twice(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    rig.kube.is_lagging = True
    await rig.turn(3)
    assert rig.kube.asked_for("create", "Pod") == ["default-0", "default-1"]


async def test_a_pod_of_ours_that_the_store_has_not_seen_is_taken_in(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.turn()
    unseen = rig.get("Pod", "default-1")
    rig.store.take("Pod", {**unseen, "metadata": {**unseen["metadata"], "resourceVersion": "9999"}}, is_deleted=True)
    rig.kube.objects["Pod", key("default-1")]["metadata"]["resourceVersion"] = "10000"
    await rig.turn(2)
    assert list(rig.kube.named("Pod")) == ["default-0", "default-1"]
    assert rig.kube.asked_for("get", "Pod") == ["default-1"]


async def test_a_name_that_a_foreign_pod_has_is_told_and_passed_over(rig: ClusterRig) -> None:
    rig.kube.put(foreign_pod("default-0"))
    rig.kube.put(pool())
    await rig.turn(3)
    assert list(rig.kube.named("Pod")) == ["default-0", "default-1", "default-2"]
    assert rig.kube.asked_for("create", "Pod").count("default-0") == 1
    assert "belongs to something else" in condition(rig.get("WorkerPool", "default"), "Ready")["message"]


async def test_refused_pods_are_told_tried_later_and_harm_no_other_pool(
    rig: ClusterRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.kube.put(pool("full"))
    rig.kube.put(pool("other", 1))
    words = "cannot create pods in namespace 'ns': exceeded quota: pods=0"
    with rig.kube.refusing(Denied(words), "create", "Pod", "full-0"):
        await rig.turn(3)
    assert list(rig.kube.named("Pod")) == ["full-1", "other-0"]
    assert rig.kube.asked_for("create", "Pod").count("full-0") == 1
    told = condition(rig.get("WorkerPool", "full"), "Progressing")
    assert (told["status"], told["reason"]) == ("False", "FailedCreate")
    assert "exceeded quota" in told["message"]
    assert [event.reason for event in rig.kube.events if event.is_warning] == ["FailedCreate"]
    assert sum(words in record.message for record in caplog.records) == 1
    rig.kube.put(pool("full", image="naru/worker:2"))  # an edit is tried at once
    await rig.turn()
    assert "full-0" in rig.kube.named("Pod")


async def test_a_budget_that_cannot_be_applied_keeps_no_pod_from_its_creation(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    with rig.kube.refusing(Forbidden("no permission for budgets"), "apply", "PodDisruptionBudget"):
        await rig.turn()
    assert list(rig.kube.named("Pod")) == ["default-0", "default-1"]
    assert condition(rig.get("WorkerPool", "default"), "Ready")["reason"] == "FailedApply"
    await rig.turn()
    assert list(rig.kube.named("PodDisruptionBudget")) == ["default-workers"]


async def test_a_budget_that_somebody_deleted_comes_back_at_the_resync(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.converge()
    rig.kube.remove("PodDisruptionBudget", key("default-workers"))
    await rig.turn()
    assert not rig.kube.named("PodDisruptionBudget"), "nobody announces its end"
    await rig.restart(resync_s=0.0)
    await rig.turn()
    rig.kube.remove("PodDisruptionBudget", key("default-workers"))
    await rig.turn()
    assert list(rig.kube.named("PodDisruptionBudget")) == ["default-workers"]


async def test_a_deletion_that_is_refused_leaves_the_pod_in_the_count_until_it_is_answered(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.converge()
    for name in ("default-0", "default-1"):
        await rig.start_worker(name)
    await rig.converge()
    rig.kube.put(pool(workers=1))
    with rig.kube.refusing(Denied("a webhook says no"), "delete", "Pod"):
        await rig.turn(2)
    assert rig.get("WorkerPool", "default")["status"]["workers"]["draining"] == 0
    assert rig.kube.asked_for("create", "Pod") == ["default-0", "default-1"]
    await rig.turn(2)
    going = [name for name, pod in rig.kube.named("Pod").items() if "deletionTimestamp" in pod["metadata"]]
    assert going == ["default-1"]
    assert rig.kube.asked_for("create", "Pod") == ["default-0", "default-1"]


async def test_a_rollout_never_has_more_pods_than_its_surge_allows(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.converge()
    for name in ("default-0", "default-1"):
        await rig.start_worker(name)
    await rig.converge()
    most = 0
    create = rig.kube.create

    async def counted(obj: Object, namespace: str | None = None) -> Object:
        nonlocal most
        made = await create(obj, namespace)
        most = max(most, sum("deletionTimestamp" not in pod["metadata"] for pod in rig.kube.named("Pod").values()))
        return made

    rig.kube.create = counted  # type: ignore[method-assign]
    rig.kube.put(pool(image="naru/worker:2"))
    for _ in range(12):
        await rig.turn()
        for name, pod in rig.kube.named("Pod").items():
            if "deletionTimestamp" in pod["metadata"]:
                await rig.lose_worker(name)
                rig.kube.remove("Pod", key(name))
            elif name not in rig.workers:
                await rig.start_worker(name)
    images = [pod["spec"]["containers"][0]["image"] for pod in rig.kube.named("Pod").values()]
    assert (most, images) == (3, ["naru/worker:2"] * 2)


async def test_a_pod_told_to_go_is_not_told_again_while_the_watch_lags(rig: ClusterRig) -> None:
    rig.kube.put(pool())
    await rig.converge()
    for name in ("default-0", "default-1"):
        await rig.start_worker(name)
    await rig.converge()
    rig.kube.put(pool(workers=1))
    rig.kube.is_lagging = True
    await rig.turn(3)
    assert rig.kube.asked_for("delete", "Pod") == ["default-1"]


async def test_steps_without_an_answer_fail_the_turn_and_keep_no_other_pool_waiting(rig: ClusterRig) -> None:
    """A webhook that is down answers for one object as an API server that is away does for all."""
    rig.kube.put(pool("a"))
    rig.kube.put(pool("b", 1))
    away = ApiAway("failed calling webhook")
    with rig.kube.refusing(away, "apply", "PodDisruptionBudget"), rig.kube.refusing(away, "create", "Pod", "a-1"):
        with pytest.raises(ApiAway):
            await rig.turn()
    assert list(rig.kube.named("Pod")) == ["a-0", "b-0"]
    await rig.turn()
    assert list(rig.kube.named("Pod")) == ["a-0", "a-1", "b-0"]


async def test_a_pool_made_anew_under_its_name_gets_pods_of_its_own(rig: ClusterRig) -> None:
    rig.kube.put(pool(workers=1))
    await rig.converge()
    rig.kube.remove("WorkerPool", key("default"))
    fresh = rig.kube.put(pool(workers=1))
    await rig.converge()  # the garbage collector has not come yet
    own = [
        name
        for name, pod in rig.kube.named("Pod").items()
        if pod["metadata"]["ownerReferences"][0]["uid"] == fresh["metadata"]["uid"]
    ]
    assert own == ["default-1"]
    assert (
        rig.kube.named("PodDisruptionBudget")["default-workers"]["metadata"]["ownerReferences"][0]["uid"]
        == (fresh["metadata"]["uid"])
    )


async def test_a_pool_that_cannot_be_read_is_told_and_keeps_its_pods_and_its_name(rig: ClusterRig) -> None:
    rig.kube.put(pool(workers=1))
    rig.kube.put(pool("other", 1))
    await rig.converge()
    rig.kube.put(pool(workers=1, fromALaterVersion={"a": 1}))
    await rig.converge()
    told = condition(rig.get("WorkerPool", "default"), "Accepted")
    assert (told["status"], told["reason"]) == ("False", "InvalidSpec")
    assert "fromALaterVersion" in told["message"]
    assert list(rig.kube.named("Pod")) == ["default-0", "other-0"]
    rig.kube.put(pool(workers=2))
    await rig.converge()
    assert condition(rig.get("WorkerPool", "default"), "Accepted")["status"] == "True"
    assert "default-1" in rig.kube.named("Pod")


async def test_a_pool_that_cannot_be_read_keeps_its_name_from_a_younger_one(rig: ClusterRig) -> None:
    rig.kube.put(pool(workers=1))
    await rig.converge()
    rig.kube.put(pool(workers=1, fromALaterVersion=1))
    younger = pool(workers=1)
    younger["metadata"] |= {"namespace": OTHER_NAMESPACE}
    rig.kube.put(younger)
    await rig.converge()
    told = condition(rig.kube.objects["WorkerPool", ObjectKey(OTHER_NAMESPACE, "default")], "Accepted")
    assert (told["status"], told["reason"]) == ("False", "NameConflict")
    assert list(rig.kube.named("Pod")) == ["default-0"]


async def test_no_secret_of_a_manifest_reaches_the_log(rig: ClusterRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig.kube.put(pool(workers=1, template={"env": [{"name": "TOKEN", "value": "hush-hush"}]}))
    rig.kube.put(pool("bad", template={"env": [{"name": "TOKEN", "value": "hush-hush", "more": 1}]}))
    await rig.converge()
    assert "hush-hush" not in caplog.text
    assert "hush-hush" not in str(rig.get("WorkerPool", "bad")["status"])
    assert names.LABEL_POOL in rig.get("Pod", "default-0")["metadata"]["labels"]
