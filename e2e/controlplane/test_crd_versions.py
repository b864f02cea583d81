"""The documented way to a next version, walked with a copy of the definition under another group: no object is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from naru_cluster.api import KubeCluster

from naru_proto import crdgen
from naru_proto.crd.worker_pool import WorkerPool

GROUP = "next.naru.dev"
NAME = f"workerpools.{GROUP}"


def definition(versions: dict[str, bool], stored: str) -> dict[str, Any]:
    """The printed definition with these versions (served or not), one of them stored."""
    found = copy.deepcopy(crdgen.crd(WorkerPool))
    found["metadata"]["name"] = NAME
    spec = found["spec"]
    spec["group"] = GROUP
    del spec["names"]["shortNames"], spec["names"]["categories"]
    (version,) = spec["versions"]
    spec["versions"] = [
        {**copy.deepcopy(version), "name": name, "served": served, "storage": name == stored}
        for name, served in versions.items()
    ]
    return found


@pytest.fixture
def cluster_with_copy(control_plane: KubeCluster) -> Iterator[KubeCluster]:
    yield control_plane
    control_plane.kubectl("delete", "crd", NAME, "--ignore-not-found")


def apply(cluster: KubeCluster, versions: dict[str, bool], stored: str) -> None:
    text = json.dumps(definition(versions, stored))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=text)
    cluster.wait_established(NAME)


def read(cluster: KubeCluster, namespace: str, version: str) -> dict[str, Any]:
    path = f"/apis/{GROUP}/{version}/namespaces/{namespace}/workerpools/p"
    answer = cluster.wait_for(
        lambda: found if (found := cluster.api.get(path)).status_code != 404 else None, 30.0, f"{version} is served"
    )
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_objects_move_to_the_next_version_as_they_are(cluster_with_copy: KubeCluster, namespace: str) -> None:
    cluster = cluster_with_copy
    apply(cluster, {"v1alpha1": True}, "v1alpha1")
    pool = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "p"}}
    cluster.apply({**pool, "spec": {"workers": {"min": 3}}}, namespace)
    before = read(cluster, namespace, "v1alpha1")

    both = {"v1alpha1": True, "v1beta1": True}
    apply(cluster, both, "v1alpha1")
    assert read(cluster, namespace, "v1beta1")["spec"] == before["spec"]
    apply(cluster, both, "v1beta1")
    refused = cluster.try_kubectl(
        "apply", "--server-side", "--force-conflicts", "--filename", "-",
        stdin=json.dumps(definition({"v1beta1": True}, "v1beta1")),
    )  # fmt: skip
    assert refused.rc == 1
    assert "storedVersions" in refused.stderr

    stored = cluster.kubectl("get", NAME, "--all-namespaces", "--output", "json")
    cluster.kubectl("replace", "--filename", "-", stdin=stored)
    patch = '{"status": {"storedVersions": ["v1beta1"]}}'
    cluster.kubectl("patch", "crd", NAME, "--subresource", "status", "--type", "merge", "--patch", patch)
    apply(cluster, {"v1beta1": True}, "v1beta1")
    after = read(cluster, namespace, "v1beta1")
    assert (after["spec"], after["metadata"]["uid"], after["metadata"]["generation"]) == (
        before["spec"],
        before["metadata"]["uid"],
        before["metadata"]["generation"],
    )


def test_an_added_rule_lets_stored_objects_stand_until_that_part_changes(
    cluster_with_copy: KubeCluster, namespace: str
) -> None:
    cluster = cluster_with_copy
    apply(cluster, {"v1alpha1": True}, "v1alpha1")
    pool = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "p"}}
    cluster.apply({**pool, "spec": {"workers": {"min": 3}}}, namespace)
    narrowed = definition({"v1alpha1": True}, "v1alpha1")
    schema = narrowed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["workers"]["properties"]["min"]["maximum"] = 2
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=json.dumps(narrowed))

    path = f"/apis/{GROUP}/v1alpha1/namespaces/{namespace}/workerpools/p"
    merge = {"content-type": "application/merge-patch+json"}

    def scaled(count: int) -> bool:
        dry = {"dryRun": "All"}
        return cluster.api.patch(path, params=dry, headers=merge, json={"spec": {"workers": {"min": count}}}).is_success

    cluster.wait_for(lambda: not scaled(4), 30.0, "the narrowed range is in force")
    cluster.api.patch(path, headers=merge, json={"spec": {"drainTimeout": "90s"}}).raise_for_status()
    assert scaled(2)
