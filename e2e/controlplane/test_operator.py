"""The operator against a real API server and scheduler: what objects ask for happens, once, whoever dies meanwhile.

Workers are fake (a real gRPC service and lease each), pods become ready on fake nodes; everything else is real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from naru_cluster.api import KubeCluster

sys.path.insert(0, str(Path(__file__).parent / "support"))

from operator_stack import API, OperatorStack, condition, model, pool, settle

from naru_proto import names

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="session")
def fake_nodes(crds: KubeCluster) -> KubeCluster:
    """The control plane with definitions and two nodes on which pods become ready."""
    crds.add_fake_nodes(2)
    return crds


@pytest.fixture
def stack(fake_nodes: KubeCluster, namespace: str, tmp_path: Path) -> Iterator[OperatorStack]:
    """Redis and the fleet; each story starts its operator."""
    with OperatorStack(fake_nodes, namespace, tmp_path) as running:
        yield running


def uids(stack: OperatorStack) -> dict[str, str]:
    """Worker pods: name to uid."""
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in stack.pods()}


def ready_workers(stack: OperatorStack, name: str = "default") -> int:
    """As the pool's status counts them."""
    return int((stack.status("workerpools", name).get("workers") or {}).get("ready") or 0)


def versions(stack: OperatorStack) -> dict[str, str]:
    """The resourceVersion of everything the operator writes."""
    paths = {
        "pods": f"/api/v1/namespaces/{stack.namespace}/pods",
        "models": f"{API}/namespaces/{stack.namespace}/modeldeployments",
        "pools": f"{API}/namespaces/{stack.namespace}/workerpools",
        "revisions": f"/apis/apps/v1/namespaces/{stack.namespace}/controllerrevisions",
        "budgets": f"/apis/policy/v1/namespaces/{stack.namespace}/poddisruptionbudgets",
    }
    return {
        f"{kind}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for kind, path in paths.items()
        for item in stack.cluster.api.get(path).json()["items"]
    }


def test_pools_become_workers_and_models_are_placed_registered_and_told(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one", alias="first"), model("lazy", residency={"policy": "OnDemand"}))
    status = stack.wait_phase("one", "Ready")
    assert status["replicas"] == {"desired": 1, "resident": 1, "ready": 1}
    assert next(it["worker"] for it in status["residents"]) in uids(stack)
    for kind in ("Accepted", "Placed", "WeightsCached", "Loaded", "Available"):
        assert condition(status, kind)["status"] == "True", kind
        assert condition(status, kind)["observedGeneration"] == 1
    assert status["currentRevision"] == status["updateRevision"]
    records = stack.records()
    assert records["one"].target == f"one@{status['currentRevision']}"
    assert records["one"].aliases == ("first",)
    assert records[records["one"].target].is_revision
    assert "lazy" in records
    stack.wait(lambda: ready_workers(stack) == 2, "both workers are ready")
    pods = stack.pods()
    assert [pod["metadata"]["name"] for pod in pods] == ["default-0", "default-1"]
    assert {pod["metadata"]["ownerReferences"][0]["kind"] for pod in pods} == {"WorkerPool"}
    assert "finalizers" not in stack.get("modeldeployments", "one")["metadata"]
    assert "finalizers" not in stack.get("workerpools", "default")["metadata"]
    (budget,) = stack.cluster.api.get(f"/apis/policy/v1/namespaces/{stack.namespace}/poddisruptionbudgets").json()[
        "items"
    ]
    assert budget["spec"]["maxUnavailable"] == 1


def test_nothing_is_written_while_nothing_happens_and_a_restart_changes_nothing(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), *(model(f"m{index}") for index in range(5)))
    for index in range(5):
        stack.wait_phase(f"m{index}", "Ready")
    stack.wait(lambda: stack.status("workerpools", "default").get("phase") == "Ready", "the pool is ready")
    settle(3)
    before, registry = versions(stack), stack.records()
    settle(12)  # past a resync
    assert versions(stack) == before
    stack.kill("operator")
    stack.start_operator()
    stack.wait(stack.is_ready, "the new operator is ready")
    settle(12)
    assert versions(stack) == before
    assert stack.records() == registry


def test_an_operator_killed_at_any_moment_leaves_no_duplicate_and_no_half(stack: OperatorStack) -> None:
    """Killed again and again while a pool and its models come up; the pods are made once each."""
    stack.apply(pool(workers=4), *(model(f"m{index}") for index in range(8)))
    deadline_s = time.monotonic() + 60
    for turn in range(6):
        stack.start_operator()
        settle(0.7 + 0.25 * turn)  # a moment further on each time
        stack.kill("operator")
        assert time.monotonic() < deadline_s
    seen = uids(stack)
    stack.start_operator()
    for index in range(8):
        stack.wait_phase(f"m{index}", "Ready")
    stack.wait(lambda: ready_workers(stack) == 4, "four workers")
    now = uids(stack)
    assert sorted(now) == [f"default-{slot}" for slot in range(4)]
    assert {name: uid for name, uid in now.items() if name in seen} == seen
    revisions = stack.cluster.api.get(f"/apis/apps/v1/namespaces/{stack.namespace}/controllerrevisions").json()
    assert len(revisions["items"]) == 8


def test_deletion_needs_no_operator_and_an_absent_one_catches_up(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one"), model("two"))
    stack.wait_phase("one", "Ready")
    stack.wait_phase("two", "Ready")
    stack.kill("operator")
    stack.cluster.kubectl("delete", "md", "one", "-n", stack.namespace, timeout_s=20)
    assert stack.get("modeldeployments", "one") == {}
    stack.cluster.kubectl(
        "patch", "md", "two", "-n", stack.namespace, "--type=merge", "-p", '{"spec":{"replicas":{"min":2}}}'
    )
    victim = stack.pods()[0]["metadata"]
    stack.cluster.kubectl("delete", "pod", victim["name"], "-n", stack.namespace, timeout_s=60)
    stack.start_operator()
    stack.wait(lambda: not [name for name in stack.records() if names.base_name(name) == "one"], "one is forgotten")
    stack.wait(lambda: ready_workers(stack) == 2, "the lost worker is replaced")
    stack.wait(lambda: stack.status("modeldeployments", "two")["replicas"]["ready"] == 2, "two copies, as edited")


def test_a_namespace_with_models_goes_away_while_no_operator_runs(
    fake_nodes: KubeCluster, stack: OperatorStack
) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one"))
    stack.wait_phase("one", "Ready")
    stack.kill("operator")
    fake_nodes.kubectl("delete", "namespace", stack.namespace, "--timeout=60s", timeout_s=90)
    assert fake_nodes.try_kubectl("get", "namespace", stack.namespace).rc != 0


def test_names_are_served_once_and_the_loser_is_told_and_takes_over(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one", alias="shared"))
    stack.wait_phase("one", "Ready")
    stack.apply(model("other", alias="shared"))

    def waiting() -> dict[str, Any] | None:
        told = condition(stack.status("modeldeployments", "other"), "Accepted")
        return told if told.get("reason") == "AliasWaits" else None

    told = stack.wait(waiting, "other waits for the alias")
    assert told["status"] == "True" and "shared" in told["message"]
    stack.wait_phase("other", "Ready")
    assert (stack.records()["one"].aliases, stack.records()["other"].aliases) == (("shared",), ())
    stack.cluster.kubectl("delete", "md", "one", "-n", stack.namespace)
    stack.wait(lambda: stack.records()["other"].aliases == ("shared",), "other has the alias")


def test_an_alias_that_is_given_up_moves_to_the_model_that_waits_for_it(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one", alias="shared"), model("other", alias="shared"))
    stack.wait_phase("one", "Ready")
    stack.wait_phase("other", "Ready")
    holder, taker = ("one", "other") if stack.records()["one"].aliases else ("other", "one")
    stack.apply(model(holder))
    stack.wait(lambda: stack.records()[taker].aliases == ("shared",), "the alias has moved")
    assert stack.records()[holder].aliases == ()


def test_a_model_that_cannot_be_loaded_is_told_and_harms_no_other(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("good"), model("bad", "hf://org/missing"))
    stack.wait_phase("good", "Ready")
    status = stack.wait_phase("bad", "Failed")
    assert condition(status, "Available")["status"] == "False"
    assert "hf://org/missing does not exist" in status["lastError"]["message"]
    assert condition(stack.status("modeldeployments", "good"), "Available")["status"] == "True"
    stack.apply(model("bad", "hf://org/there"))
    status = stack.wait_phase("bad", "Ready")
    assert "lastError" not in status


def test_a_revision_moves_the_name_when_it_is_ready_and_a_bad_one_never(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one", replicas={"min": 2}))
    stack.wait(lambda: (stack.status("modeldeployments", "one").get("replicas") or {}).get("ready") == 2, "2 copies")
    first = stack.status("modeldeployments", "one")["currentRevision"]
    stack.apply(model("one", "hf://org/missing", replicas={"min": 2}))

    def is_stopped() -> bool:
        return condition(stack.status("modeldeployments", "one"), "Progressing").get("status") == "False"

    stack.wait(is_stopped, "the bad revision is stopped")
    status = stack.status("modeldeployments", "one")
    assert condition(status, "Progressing")["reason"] == "RevisionFailed"
    assert condition(status, "Available")["status"] == "True"
    assert (status["currentRevision"], stack.records()["one"].target) == (first, f"one@{first}")
    assert status["updateRevision"] != first

    stack.apply(model("one", "hf://org/two", replicas={"min": 2}))
    stack.wait(lambda: stack.status("modeldeployments", "one").get("currentRevision") != first, "a new one serves")
    status = stack.wait_phase("one", "Ready")
    second = status["currentRevision"]
    assert stack.records()["one"].target == f"one@{second}"
    stack.wait(lambda: set(stack.records()) == {"one", f"one@{second}"}, "the old revisions are forgotten")


def test_a_pool_rolls_with_surge_and_never_falls_below_what_it_had(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(workers=3), model("one"))
    stack.wait_phase("one", "Ready")
    stack.wait(lambda: ready_workers(stack) == 3, "three workers")
    before, fewest, most = uids(stack), 3, 3
    stack.apply(pool(workers=3, image="naru.local/worker:e2e-2"))

    def is_rolled() -> bool:
        nonlocal fewest, most
        pods = stack.pods()
        ready = [
            pod
            for pod in pods
            if any(it["type"] == "Ready" and it["status"] == "True" for it in pod["status"].get("conditions") or ())
        ]
        fewest, most = min(fewest, len(ready)), max(most, len(pods))
        images = [pod["spec"]["containers"][0]["image"] for pod in pods]
        return images == ["naru.local/worker:e2e-2"] * 3

    stack.wait(is_rolled, "all three are of the new image", 120)
    assert (fewest, most) == (3, 4)
    assert not set(before.values()) & set(uids(stack).values())
    stack.wait_phase("one", "Ready")


def test_two_replicas_act_as_one_and_the_other_takes_over(stack: OperatorStack) -> None:
    stack.start_operator("a")
    stack.wait(lambda: stack.is_ready("a"), "a is ready")
    stack.start_operator("b")
    stack.apply(pool(), *(model(f"m{index}") for index in range(6)))
    settle(1.5)
    stack.kill("a")
    for index in range(6):
        stack.wait_phase(f"m{index}", "Ready", 90)
    assert sorted(uids(stack)) == ["default-0", "default-1"]

    def holder() -> str:
        lease = stack.cluster.kubectl_json("get", "lease", names.LEASE_OPERATOR, "-n", stack.namespace)
        return str(lease["spec"]["holderIdentity"])

    stack.wait(lambda: holder().startswith("b"), "b holds the lease")


def test_an_api_server_that_restarts_and_an_emptied_redis_are_caught_up_with(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one"))
    stack.wait_phase("one", "Ready")
    target = stack.records()["one"].target
    stack.cluster.restart("kube-apiserver")
    stack.apply(model("two"))
    stack.wait_phase("two", "Ready", 90)
    stack.kill("redis")
    stack.start_redis()  # empty: it keeps nothing
    stack.wait(lambda: stack.records().get("one") is not None, "the registry is written again")
    assert stack.records()["one"].target == target
    stack.wait_phase("one", "Ready")


def test_many_edits_at_once_end_in_what_was_written_last(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(), model("one"))
    stack.wait_phase("one", "Ready")
    path = f"{API}/namespaces/{stack.namespace}/modeldeployments/one"
    headers = {"content-type": "application/merge-patch+json"}
    for number in range(50):
        body = {"metadata": {"annotations": {"n": str(number)}}, "spec": {"replicas": {"min": 1 + number % 2}}}
        assert stack.cluster.api.patch(path, json=body, headers=headers).status_code == 200
    stack.wait(lambda: stack.status("modeldeployments", "one")["replicas"]["ready"] == 2, "the last edit's copies")
    item = stack.get("modeldeployments", "one")
    assert item["metadata"]["annotations"]["n"] == "49"
    assert item["spec"]["replicas"]["min"] == 2
    assert "Traceback" not in stack.log()


def test_long_names_and_dots_are_served_under_their_full_names(stack: OperatorStack) -> None:
    stack.start_operator()
    long = "llama-3.1-8b." + "x" * 100
    twin = long + "y"
    stack.apply(pool("p" * 60 + ".pool", workers=1), model(long), model(twin))
    stack.wait_phase(long, "Ready")
    stack.wait_phase(twin, "Ready")
    assert {long, twin} <= set(stack.records())
    (pod,) = stack.pods()
    assert len(pod["metadata"]["name"]) <= 63
    revisions = stack.cluster.api.get(f"/apis/apps/v1/namespaces/{stack.namespace}/controllerrevisions").json()
    assert len({item["metadata"]["name"] for item in revisions["items"]}) == 2


def test_a_pool_that_does_not_fit_names_the_shortage(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool("gpus", workers=5, accelerator={"kind": "cuda", "count": 4}))
    stack.wait(lambda: sum("nodeName" in pod["spec"] for pod in stack.pods()) == 4, "four fit on two nodes of eight")

    def told() -> bool:
        return any(
            "Insufficient nvidia.com/gpu" in it["message"]
            for it in stack.status("workerpools", "gpus").get("conditions", ())
        )

    stack.wait(told, "the shortage is told")


def test_a_missing_storage_class_is_told_and_heals_when_it_appears(stack: OperatorStack) -> None:
    stack.start_operator()
    name = f"late-{stack.namespace}"
    stack.apply(pool(workers=1, cache={"storageClassName": name, "size": "1Gi"}))

    def told() -> dict[str, Any] | None:
        found = condition(stack.status("workerpools", "default"), "StorageReady")
        return found if found.get("status") == "False" and name in found.get("message", "") else None

    assert stack.wait(told, "the class is named")


def test_a_scaled_number_stays_when_other_fields_are_applied(stack: OperatorStack) -> None:
    stack.start_operator()
    stack.apply(pool(workers=1))
    stack.cluster.kubectl("scale", "wp", "default", "--replicas=3", "-n", stack.namespace)
    stack.wait(lambda: ready_workers(stack) == 3, "three workers")
    stack.cluster.kubectl("label", "wp", "default", "touched=yes", "-n", stack.namespace)
    settle(7)  # past a resync
    assert stack.get("workerpools", "default")["spec"]["workers"]["min"] == 3
    assert len(stack.pods()) == 3
