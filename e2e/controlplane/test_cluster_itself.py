"""The control plane the other tests stand on: real definitions, a scheduler that packs, components that come back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from naru_cluster.api import KubeCluster, NotOurs
from naru_cluster.errors import CommandFailed

from naru_proto.crd import v1alpha1

SELECTOR = {"pack": "true"}
GROUP = "/apis/serving.naru.dev/v1alpha1"


def pod(name: str, gpus: int, **annotations: str) -> dict[str, Any]:
    amounts = {"nvidia.com/gpu": str(gpus), "cpu": "1"}
    container = {"name": "main", "image": "none", "resources": {"requests": amounts, "limits": amounts}}
    return {
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"containers": [container], "nodeSelector": SELECTOR},
    }


def create(cluster: KubeCluster, namespace: str, body: dict[str, Any]) -> None:
    cluster.api.post(f"/api/v1/namespaces/{namespace}/pods", json=body).raise_for_status()


def read(cluster: KubeCluster, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}").raise_for_status().json()
    return found


def runs(cluster: KubeCluster, namespace: str, name: str) -> bool:
    status = read(cluster, namespace, name)["status"]
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))


@pytest.fixture(scope="module")
def fake_nodes(control_plane: KubeCluster) -> Iterator[list[str]]:
    try:
        names = control_plane.add_fake_nodes(3, prefix="pack", labels=SELECTOR)
    except NotOurs as exc:
        pytest.skip(str(exc))
    yield names
    for name in names:
        control_plane.api.delete(f"/api/v1/nodes/{name}").raise_for_status()


def test_both_definitions_are_served(crds: KubeCluster) -> None:
    listed = crds.api.get(GROUP).raise_for_status().json()["resources"]
    assert {item["name"] for item in listed} == {
        f"{plural}{suffix}" for plural in ("modeldeployments", "workerpools") for suffix in ("", "/status", "/scale")
    }


def test_the_examples_are_taken_and_read_back_by_the_models(crds: KubeCluster, namespace: str) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    crds.kubectl("apply", "--namespace", namespace, "--filename", str(examples))
    stored = crds.kubectl_json("get", "naru", "--namespace", namespace)
    assert len(v1alpha1.load_manifests([stored])) == len(stored["items"]) > 0


def test_the_scheduler_fills_nodes_before_it_takes_another(
    control_plane: KubeCluster, namespace: str, fake_nodes: list[str]
) -> None:
    sizes = [2, 4, 2, 2, 4]
    for number, gpus in enumerate(sizes):
        create(control_plane, namespace, pod(f"pod-{number}", gpus))
        control_plane.wait_for(functools.partial(runs, control_plane, namespace, f"pod-{number}"), 30.0, "it runs")
    used = Counter[str]()
    for number, gpus in enumerate(sizes):
        used[read(control_plane, namespace, f"pod-{number}")["spec"]["nodeName"]] += gpus
    assert sorted(used.values()) == [6, 8], "one node is full before the next is begun, the third stays free"


def test_a_pod_that_does_not_fit_names_the_shortage(
    control_plane: KubeCluster, namespace: str, fake_nodes: list[str]
) -> None:
    create(control_plane, namespace, pod("too-large", 9))

    def refused() -> str | None:
        conditions = read(control_plane, namespace, "too-large")["status"].get("conditions", ())
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), None)

    message = control_plane.wait_for(refused, 30.0, "the scheduler says why")
    assert "3 Insufficient nvidia.com/gpu" in message, message


def test_pods_on_fake_nodes_go_when_they_are_deleted(
    control_plane: KubeCluster, namespace: str, fake_nodes: list[str]
) -> None:
    create(control_plane, namespace, pod("short", 1))
    control_plane.wait_for(lambda: runs(control_plane, namespace, "short"), 30.0, "it runs")
    path = f"/api/v1/namespaces/{namespace}/pods/short"
    control_plane.api.delete(path).raise_for_status()
    control_plane.wait_for(lambda: control_plane.api.get(path).status_code == 404, 30.0, "it is gone")


def test_a_pod_on_hold_is_left_to_the_test(control_plane: KubeCluster, namespace: str, fake_nodes: list[str]) -> None:
    create(control_plane, namespace, pod("held", 1, **{"naru-cluster/hold": "true"}))
    create(control_plane, namespace, pod("after", 1))
    control_plane.wait_for(lambda: "nodeName" in read(control_plane, namespace, "held")["spec"], 30.0, "it is bound")
    control_plane.wait_for(lambda: runs(control_plane, namespace, "after"), 30.0, "a later one runs")
    assert read(control_plane, namespace, "held")["status"]["phase"] == "Pending"


@pytest.mark.parametrize("component", ["kube-apiserver", "etcd"])
def test_what_was_written_survives_a_killed_component(
    control_plane: KubeCluster, namespace: str, component: str
) -> None:
    body = {"metadata": {"name": "kept"}, "data": {"key": "value"}}
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    control_plane.api.post(path, json=body).raise_for_status()
    control_plane.kill(component)
    if component == "kube-apiserver":
        with pytest.raises(httpx.TransportError):
            control_plane.api.get(f"{path}/kept")
    control_plane.start(component)
    kept = control_plane.wait_for(lambda: control_plane.api.get(f"{path}/kept").raise_for_status(), 30.0, "it answers")
    assert kept.json()["data"] == {"key": "value"}


def test_the_controllers_do_their_work_after_a_restart(control_plane: KubeCluster, namespace: str) -> None:
    control_plane.restart("kube-controller-manager")
    owner = control_plane.api.post(
        f"/api/v1/namespaces/{namespace}/configmaps", json={"metadata": {"name": "owner"}}
    ).raise_for_status()
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.json()["metadata"]["uid"]}
    child = {"metadata": {"name": "child", "ownerReferences": [reference]}}
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    control_plane.api.post(path, json=child).raise_for_status()
    control_plane.api.delete(f"{path}/owner").raise_for_status()
    control_plane.wait_for(
        lambda: control_plane.api.get(f"{path}/child").status_code == 404, 60.0, "the garbage collector took it"
    )


def test_a_command_that_fails_says_what_it_said(control_plane: KubeCluster) -> None:
    with pytest.raises(CommandFailed, match='configmaps "absent" not found'):
        control_plane.kubectl("get", "configmap", "absent")
