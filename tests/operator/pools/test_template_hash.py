"""Which changes make pods outdated: exactly those that change the pod."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pool_world import SETTINGS, make_pool, raw_pool

from naru_operator.core.kube import Object
from naru_operator.core.pools.model import PodSettings
from naru_operator.core.pools.pod_manifest import template_hash, worker_pod
from naru_proto import names
from naru_proto.crd.base import CrdModel
from naru_proto.crd.pod_template import PodTemplate
from naru_proto.crd.v1alpha1 import WorkerPoolSpec
from naru_proto.crd.worker_pool import AcceleratorSpec, MemorySpec, ModelCacheSpec, TopologySpec

CUDA = {"kind": "cuda", "count": 2}
SPECS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {"accelerator": {"kind": "cuda"}}, True),
    ({"accelerator": {"kind": "cuda"}}, {"accelerator": {"kind": "cuda", "count": 1}}, False),
    ({"accelerator": {"kind": "cuda"}}, {"accelerator": CUDA}, True),
    ({"accelerator": CUDA}, {"accelerator": {**CUDA, "resourceName": "nvidia.com/mig-1g.10gb"}}, True),
    ({"accelerator": CUDA}, {"accelerator": {**CUDA, "product": "NVIDIA-H100"}}, True),
    ({}, {"accelerator": {"kind": "cpu", "resourceName": "x/y"}}, False),
    ({}, {"workers": {"min": 7}}, False),
    ({}, {"workers": {"min": 1, "max": 9}}, False),
    ({}, {"memory": {"budget": "1Gi"}}, True),
    ({"memory": {"budget": "1Gi"}}, {"memory": {"budget": 1 << 30}}, False),
    ({}, {"memory": {"host": 0}}, True),
    ({}, {"memory": {"highWatermark": 0.9}}, True),
    ({}, {"memory": {"lowWatermark": 0.5}}, True),
    ({}, {"memory": {"lowWatermark": 0.7, "highWatermark": 0.8}}, False),
    ({}, {"threads": 2}, True),
    ({}, {"cache": {"size": "5Gi"}}, True),
    ({}, {"cache": {"hostPath": "/x"}}, True),
    ({}, {"cache": {"size": "5Gi", "storageClassName": "c"}}, True),
    ({}, {"autoscaling": {"targetMemoryRatio": 0.5, "targetQueueTime": "1s", "scaleDownDelay": "1s"}}, False),
    ({}, {"drainTimeout": "61s"}, True),
    ({"drainTimeout": "60s"}, {"drainTimeout": "1m"}, False),
    ({}, {"moveTimeout": "61s"}, True),
    ({}, {"rollout": {"maxSurge": 0, "progressDeadline": "1s"}}, False),
    ({}, {"topology": {"policy": "Spread"}}, True),
    ({}, {"topology": {"key": "zone"}}, True),
    ({}, {"credentialSecrets": ["a"]}, True),
    ({"credentialSecrets": ["a", "b"]}, {"credentialSecrets": ["b", "a"]}, False),
    ({}, {"claims": ["a"]}, True),
    ({"claims": ["a", "b"]}, {"claims": ["b", "a"]}, False),
    ({}, {"nodeFolders": ["/a"]}, True),
    ({"nodeFolders": ["/a", "/b"]}, {"nodeFolders": ["/b", "/a"]}, False),
    ({}, {"image": "other"}, True),
    ({}, {"image": SETTINGS.image}, False),
    ({}, {"template": {"labels": {"a": "b"}}}, True),
    ({}, {"template": {"annotations": {"a": "b"}}}, True),
    ({}, {"template": {"nodeSelector": {"a": "b"}}}, True),
    ({}, {"template": {"tolerations": [{"operator": "Exists"}]}}, True),
    ({}, {"template": {"serviceAccountName": "a"}}, True),
    ({}, {"template": {"serviceAccountName": "default"}}, False),
    ({}, {"template": {"priorityClassName": "a"}}, True),
    ({}, {"template": {"runtimeClassName": "a"}}, True),
    ({}, {"template": {"imagePullSecrets": ["a"]}}, True),
    ({}, {"template": {"env": [{"name": "A", "value": "b"}]}}, True),
    ({}, {"template": {"env": [{"name": "A", "secretKey": {"name": "s", "key": "k"}}]}}, True),
    ({}, {"template": {"resources": {"requests": {"cpu": "1"}}}}, True),
    ({}, {"template": {"resources": {"limits": {"cpu": "1"}}}}, True),
    ({}, {"template": {"labels": {}, "resources": {"limits": {}}}}, False),
]
CHANGED_SETTINGS: list[tuple[dict[str, Any], bool]] = [
    ({"image": "b"}, True),
    ({"redis_secret": "b"}, True),
    ({"service_account": "b"}, True),
    ({"image_pull_policy": "Always"}, True),
    ({"image_pull_secrets": ("b",)}, True),
    ({"log_level": "debug"}, True),
    ({"env": {"A": "b"}}, True),
    ({"cluster_domain": "b"}, False),
    ({"template": {"annotations": {"checksum/redis": "b"}}}, True),
    ({"template": {"securityContext": {"readOnlyRootFilesystem": False}}}, True),
    ({"template": {"terminationGracePeriodSeconds": 900}}, True),
    ({"template": {"terminationGracePeriodSeconds": 0}}, False),
    (
        {"template": {"probes": {"startup": {}, "liveness": {}}, "labels": {}, "env": [], "priorityClassName": ""}},
        False,
    ),
]


def pod(settings: PodSettings = SETTINGS, **spec: Any) -> Object:
    """The pod without its hash."""
    item = worker_pod(make_pool(**spec), raw_pool(**spec), 0, settings)
    del item["metadata"]["labels"][names.LABEL_TEMPLATE_HASH]
    return item


def hashed(settings: PodSettings = SETTINGS, **spec: Any) -> str:
    return template_hash(make_pool(**spec), settings)


@pytest.mark.parametrize(("before", "after", "is_outdated"), SPECS)
def test_the_hash_changes_when_the_pod_does_and_only_then(
    before: dict[str, Any], after: dict[str, Any], is_outdated: bool
) -> None:
    assert (pod(**before) != pod(**after)) == is_outdated
    assert (hashed(**before) != hashed(**after)) == is_outdated


@pytest.mark.parametrize(("changes", "is_outdated"), CHANGED_SETTINGS)
def test_the_hash_follows_the_installation_as_the_pod_does(changes: dict[str, Any], is_outdated: bool) -> None:
    changed = dataclasses.replace(SETTINGS, **changes)
    assert (pod(changed) != pod()) == is_outdated
    assert (hashed(changed) != hashed()) == is_outdated


def test_an_installation_wide_image_is_nothing_to_a_pool_with_its_own() -> None:
    changed = dataclasses.replace(SETTINGS, image="b")
    assert hashed(changed, image="own") == hashed(image="own")


def test_the_cases_above_name_every_field_of_the_spec_and_of_the_settings() -> None:
    named = {name for _, after, _ in SPECS for name in after}
    assert named == {field.alias or name for name, field in WorkerPoolSpec.model_fields.items()}
    inner = {name: {key for _, after, _ in SPECS for key in after.get(name) or ()} for name in ("memory", "template")}
    inner |= {"cache": set(), "topology": set(), "accelerator": set()}
    for part in ("cache", "topology", "accelerator"):
        inner[part] = {key for _, after, _ in SPECS for key in after.get(part) or ()}
    models: dict[str, type[CrdModel]] = {
        "memory": MemorySpec,
        "template": PodTemplate,
        "cache": ModelCacheSpec,
        "topology": TopologySpec,
    }
    for part, model in (models | {"accelerator": AcceleratorSpec}).items():
        assert inner[part] == {field.alias or name for name, field in model.model_fields.items()}
    fields = {field.name for field in dataclasses.fields(PodSettings)}
    assert fields == {name for changes, _ in CHANGED_SETTINGS for name in changes}


def test_hashes_of_an_older_operator_stay_so_that_no_upgrade_rolls_all_workers() -> None:
    spec: dict[str, Any] = {
        "accelerator": CUDA,
        "memory": {"budget": "1Gi"},
        "template": {"env": [{"name": "A", "value": "b"}]},
    }
    assert (hashed(), hashed(**spec)) == ("9feb63db336971c5", "3829fd2b26bec4f8")
