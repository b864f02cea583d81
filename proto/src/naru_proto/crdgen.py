"""Prints the custom resource definitions from their pydantic models.

Called by `python -m naru_proto` and tests. Pure: models in, plain data out. The result is a structural schema:
references inlined, no unions, no titles, defaults and cross-field rules in the API server's own words.
"""

from __future__ import annotations

from typing import Any

from naru_proto import names
from naru_proto.crd.base import VALIDATIONS, CrdModel
from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.crd.worker_pool import WorkerPool

_KEEP = (
    "type",
    "description",
    "enum",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "anyOf",
)
"""Keywords taken over as they are; the order is the order of printing."""

_REFUSED = ("oneOf", "allOf", "not", "exclusiveMinimum", "exclusiveMaximum", "prefixItems", "patternProperties")
"""Keywords a structural schema has no room for, or the API server reads differently."""

_INT32_MAX = 2**31 - 1

_COLUMNS: dict[str, list[tuple[str, str, str, int]]] = {
    "ModelDeployment": [
        ("Phase", "string", ".status.phase", 0),
        ("Ready", "integer", ".status.replicas.ready", 0),
        ("Desired", "integer", ".status.replicas.desired", 0),
        ("Resident", "integer", ".status.replicas.resident", 0),
        ("Bytes", "integer", ".status.weightBytes", 0),
        ("Last used", "date", ".status.lastUsed", 0),
        ("Policy", "string", ".spec.residency.policy", 1),
        ("URI", "string", ".spec.model.uri", 1),
        ("Error", "string", ".status.lastError.message", 1),
        ("Age", "date", ".metadata.creationTimestamp", 0),
    ],
    "WorkerPool": [
        ("Phase", "string", ".status.phase", 0),
        ("Accelerator", "string", ".spec.accelerator.kind", 0),
        ("Ready", "integer", ".status.workers.ready", 0),
        ("Desired", "integer", ".status.workers.desired", 0),
        ("Used", "integer", ".status.usedBytes", 0),
        ("Budget", "integer", ".status.budgetBytes", 0),
        ("Error", "string", ".status.lastError.message", 1),
        ("Age", "date", ".metadata.creationTimestamp", 0),
    ],
}

_SCALE: dict[str, dict[str, str]] = {
    "ModelDeployment": {
        "specReplicasPath": ".spec.replicas.min",
        "statusReplicasPath": ".status.replicas.ready",
        "labelSelectorPath": ".status.selector",
    },
    "WorkerPool": {
        "specReplicasPath": ".spec.workers.min",
        "statusReplicasPath": ".status.workers.ready",
        "labelSelectorPath": ".status.selector",
    },
}

_NAMES: dict[str, dict[str, Any]] = {
    "ModelDeployment": {
        "plural": "modeldeployments",
        "singular": "modeldeployment",
        "shortNames": ["md"],
        "categories": ["naru"],
    },
    "WorkerPool": {"plural": "workerpools", "singular": "workerpool", "shortNames": ["wp"], "categories": ["naru"]},
}

ROOTS: tuple[type[CrdModel], ...] = (ModelDeployment, WorkerPool)
"""The kinds, in the order they are printed."""


def crd_names(model: type[CrdModel]) -> dict[str, Any]:
    """Plural, singular, short names and categories of a kind."""
    return _NAMES[model.__name__]


def crd(model: type[CrdModel]) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind, as data in printing order."""
    kind = model.__name__
    naming = _NAMES[kind]
    columns = [
        {"name": name, "type": type_, "jsonPath": path, **({"priority": priority} if priority else {})}
        for name, type_, path, priority in _COLUMNS[kind]
    ]
    version = {
        "name": names.API_VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": root_schema(model)},
        "subresources": {"status": {}, "scale": _SCALE[kind]},
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{naming['plural']}.{names.API_GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": names.API_GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", **naming},
            "versions": [version],
        },
    }


def root_schema(model: type[CrdModel]) -> dict[str, Any]:
    """Structural schema of a kind; apiVersion, kind and metadata belong to the API server itself."""
    schema = structural(model)
    properties = schema["properties"]
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string", "description": properties[name]["description"]}
    properties["metadata"] = {"type": "object"}
    properties["status"].pop("default")
    required = [name for name in schema.pop("required") if name not in ("apiVersion", "kind", "metadata")]
    return {**schema, "required": required} if required else schema


def structural(model: type[CrdModel]) -> dict[str, Any]:
    """Structural schema of one object, everything inlined.

    Raises:
        TypeError: a field's type has no structural schema; names the field.
    """
    source = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(source, source.get("$defs", {}), model.__name__)


def _convert(node: dict[str, Any], definitions: dict[str, Any], where: str) -> dict[str, Any]:
    node = _resolve(node, definitions, where)
    refused = [key for key in _REFUSED if key in node]
    if refused or ("anyOf" in node and "x-kubernetes-int-or-string" not in node):
        raise TypeError(f"{where}: {refused or 'a union'} has no structural schema: use ge, le and single types")
    if "const" in node:
        node = {**node, "enum": [node["const"]]}
    schema = {key: node[key] for key in _KEEP if key in node}
    if schema.get("type") == "integer":
        schema["format"] = "int32" if schema.get("maximum", _INT32_MAX + 1) <= _INT32_MAX else "int64"
    if "properties" in node:
        if "required" in node:
            schema["required"] = node["required"]
        schema["properties"] = {
            name: _convert(child, definitions, f"{where}.{name}") for name, child in node["properties"].items()
        }
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = _convert(node["additionalProperties"], definitions, f"{where}.*")
    if "items" in node:
        schema["items"] = _convert(node["items"], definitions, f"{where}[]")
    if "default" in node:
        schema["default"] = node["default"]
    return schema | {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}


def _resolve(node: dict[str, Any], definitions: dict[str, Any], where: str) -> dict[str, Any]:
    """Inlines references and turns `T | None` into T.

    Absence is how a manifest says None: the API server prunes nulls of fields that are not nullable, and CEL's has()
    then means what it says.
    """
    while True:
        options = [option for option in node.get("anyOf", ()) if option != {"type": "null"}]
        if "$ref" in node:
            target = definitions[node["$ref"].rsplit("/", 1)[1]]
        elif len(options) == 1:
            target = options[0]
        else:
            return node
        siblings = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
        rules = [*target.get(VALIDATIONS, ()), *siblings.get(VALIDATIONS, ())]
        node = target | siblings | ({VALIDATIONS: rules} if rules else {})
