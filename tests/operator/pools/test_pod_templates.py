"""All that a pool or an installation may set for the workers' pods reaches them, and what would not is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from pool_world import SETTINGS, container, pod

from naru_operator.core.kube import Object
from naru_operator.core.pools.pod_template import FIELDS, check_template
from naru_proto import names
from naru_proto.crd.pod_template import PodTemplate
from naru_proto.errors import InvalidRequest

POOL_MARKERS: dict[str, Any] = {
    "labels": {"marker-label": "m"},
    "annotations": {"marker-annotation": "m"},
    "nodeSelector": {"marker-node": "m"},
    "tolerations": [{"key": "marker-toleration", "operator": "Exists", "effect": "NoExecute"}],
    "serviceAccountName": "marker-account",
    "priorityClassName": "marker-priority",
    "runtimeClassName": "marker-runtime",
    "imagePullSecrets": ["marker-pull"],
    "env": [{"name": "MARKER", "value": "m"}],
    "resources": {"requests": {"marker/request": "1"}, "limits": {"marker/limit": "1"}},
}
POOL_PLACES: dict[str, tuple[str, Any]] = {
    "labels": ("metadata.labels.marker-label", "m"),
    "annotations": ("metadata.annotations.marker-annotation", "m"),
    "nodeSelector": ("spec.nodeSelector.marker-node", "m"),
    "tolerations": ("spec.tolerations.0", {"key": "marker-toleration", "operator": "Exists", "effect": "NoExecute"}),
    "serviceAccountName": ("spec.serviceAccountName", "marker-account"),
    "priorityClassName": ("spec.priorityClassName", "marker-priority"),
    "runtimeClassName": ("spec.runtimeClassName", "marker-runtime"),
    "imagePullSecrets": ("spec.imagePullSecrets.0", {"name": "marker-pull"}),
    "env": ("spec.containers.0.env.-1", {"name": "MARKER", "value": "m"}),
    "resources": (
        "spec.containers.0.resources",
        {"requests": {"marker/request": "1"}, "limits": {"marker/limit": "1"}},
    ),
}
TEMPLATE_MARKERS: dict[str, Any] = {
    **{name: value for name, value in POOL_MARKERS.items() if name != "serviceAccountName"},
    "imagePullSecrets": [{"name": "marker-pull"}],
    "affinity": {"nodeAffinity": {"marker": 1},
                 "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [1]}},
    "topologySpreadConstraints": [{"marker": 1}],
    "probes": {"startup": {"failureThreshold": 991}, "readiness": {"periodSeconds": 992},
               "liveness": {"exec": {"command": ["marker"]}}},
    "terminationGracePeriodSeconds": 993,
    "podSecurityContext": {"runAsUser": 994},
    "securityContext": {"readOnlyRootFilesystem": False},
    "volumes": [{"name": "marker-volume"}],
    "volumeMounts": [{"name": "marker-volume", "mountPath": "/marker"}],
}  # fmt: skip
TEMPLATE_PLACES: dict[str, tuple[str, Any]] = {
    **{name: place for name, place in POOL_PLACES.items() if name != "serviceAccountName"},
    "affinity": ("spec.affinity.nodeAffinity", {"marker": 1}),
    "topologySpreadConstraints": ("spec.topologySpreadConstraints.0", {"marker": 1}),
    "terminationGracePeriodSeconds": ("spec.terminationGracePeriodSeconds", 993),
    "probes": ("spec.containers.0.startupProbe.failureThreshold", 991),
    "podSecurityContext": ("spec.securityContext.runAsUser", 994),
    "securityContext": ("spec.containers.0.securityContext.readOnlyRootFilesystem", False),
    "volumes": ("spec.volumes.-1", {"name": "marker-volume"}),
    "volumeMounts": ("spec.containers.0.volumeMounts.-1", {"name": "marker-volume", "mountPath": "/marker"}),
}


def at(item: Any, path: str) -> Any:
    for part in path.split("."):
        item = item[int(part)] if isinstance(item, list) else item[part]
    return item


def test_there_is_a_marker_for_every_field_of_both_templates() -> None:
    fields = {field.alias or name for name, field in PodTemplate.model_fields.items()}
    assert fields == set(POOL_MARKERS) == set(POOL_PLACES)
    assert set(FIELDS) == set(TEMPLATE_MARKERS) == set(TEMPLATE_PLACES)


@pytest.mark.parametrize("name", sorted(POOL_PLACES))
def test_every_field_of_a_pools_template_reaches_the_pod(name: str) -> None:
    path, value = POOL_PLACES[name]
    assert at(pod(template={name: POOL_MARKERS[name]}), path) == value


@pytest.mark.parametrize("name", sorted(TEMPLATE_PLACES))
def test_every_field_of_the_installations_template_reaches_the_pod(name: str) -> None:
    path, value = TEMPLATE_PLACES[name]
    template = {name: TEMPLATE_MARKERS[name]}
    check_template(template)
    assert at(pod(dataclasses.replace(SETTINGS, template=template)), path) == value


def test_probes_and_affinity_of_the_installation_are_merged_with_ours() -> None:
    before = json.dumps(TEMPLATE_MARKERS)
    item = pod(dataclasses.replace(SETTINGS, template=TEMPLATE_MARKERS))
    worker = container(item)
    asked = {"periodSeconds": 992, "grpc": {"port": 9090, "service": "ready"}}
    assert worker["readinessProbe"] | asked == worker["readinessProbe"]
    assert worker["livenessProbe"]["exec"] == {"command": ["marker"]}
    assert "grpc" not in worker["livenessProbe"], "a probe has one handler"
    preferred = item["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (preferred[0], len(preferred)) == (1, 2)
    assert json.dumps(TEMPLATE_MARKERS) == before, "the installation's template is not changed by use"


def test_a_pool_beats_the_installation_key_by_key() -> None:
    template = {
        "labels": {"a": "installation", "b": "installation", names.LABEL_POOL: "evil"},
        "priorityClassName": "low",
        "imagePullSecrets": [{"name": "x"}],
    }
    settings = dataclasses.replace(SETTINGS, template=template, image_pull_secrets=("x", "y"))
    item = pod(settings, template={"labels": {"b": "pool"}, "priorityClassName": "high", "imagePullSecrets": ["z"]})
    labels = item["metadata"]["labels"]
    assert (labels["a"], labels["b"], labels[names.LABEL_POOL]) == ("installation", "pool", "p")
    assert item["spec"]["priorityClassName"] == "high"
    assert item["spec"]["imagePullSecrets"] == [{"name": "x"}, {"name": "y"}, {"name": "z"}]


@pytest.mark.parametrize(
    ("template", "param", "said"),
    [
        ({"tolerationz": []}, "tolerationz", "did you mean 'tolerations'?"),
        ({"probes": {"start": {}}}, "probes.start", "did you mean 'startup'?"),
        ({"resources": {"request": {}}}, "resources.request", "did you mean 'requests'?"),
        ({"labels": []}, "labels", "write a mapping"),
        ({"env": ["A=1"]}, "env", "mappings"),
        ({"priorityClassName": 1}, "priorityClassName", "write a text"),
        ({"terminationGracePeriodSeconds": "60"}, "terminationGracePeriodSeconds", "'60'"),
    ],
)
def test_a_template_that_would_be_ignored_in_part_is_refused(template: Object, param: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)) as caught:
        check_template(template)
    assert caught.value.param == param
