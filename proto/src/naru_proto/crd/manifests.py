"""Manifests to models: checks parsed YAML documents and says what is wrong with each, by field path.

Called by `naru up`, the operator and tests. Reads no files and parses no YAML itself.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from naru_proto import names
from naru_proto.crd.base import RULE_ERROR, CrdModel
from naru_proto.crd.model_deployment import ModelDeployment
from naru_proto.crd.units import URI_ERROR
from naru_proto.crd.worker_pool import WorkerPool
from naru_proto.errors import InvalidRequest

Manifest = ModelDeployment | WorkerPool

API_VERSION = f"{names.API_GROUP}/{names.API_VERSION}"
KINDS: dict[str, type[ModelDeployment] | type[WorkerPool]] = {
    "ModelDeployment": ModelDeployment,
    "WorkerPool": WorkerPool,
}

_ABSENT = object()
_SECRET_FIELDS = ("env", "annotations")
"""Fields whose values may be secrets: never part of a message."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one document."""

    document: str
    """Which document: place, then kind and name as far as they are known."""
    path: str
    """Dotted field path, such as spec.adapters[1].uri; empty for the whole document."""
    message: str
    """What must hold, the value, and what to write."""

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.document}: {self.path}: {self.message}" if self.path else f"{self.document}: {self.message}"


class InvalidManifest(InvalidRequest):
    """Some documents are not valid manifests; `problems` lists everything that is wrong with all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), param=self.problems[0].path)


def load_manifests(documents: Iterable[object], source: str = "manifest") -> list[Manifest]:
    """Checks the documents of one or more YAML files, in order; empty ones are left out, `List`s are opened.

    `source` names where they come from in messages. All or nothing: one bad document refuses all.

    Raises:
        InvalidManifest: with every problem of every document, names that collide included.
    """
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    for place, document in _flatten(documents, source):
        result = _load_one(document, place)
        if isinstance(result, list):
            problems += result
        else:
            manifests.append(result)
    problems += find_collisions(manifests, source)
    if problems:
        raise InvalidManifest(problems)
    return manifests


def find_collisions(manifests: Iterable[Manifest], source: str = "manifest") -> list[Problem]:
    """Objects that stand twice, and model names or aliases that two models of a namespace claim."""
    problems: list[Problem] = []
    objects: set[tuple[str, str, str]] = set()
    claims: dict[tuple[str, str], str] = {}
    for manifest in manifests:
        meta = manifest.metadata
        document = f"{source}: {manifest.kind} {meta.name!r}"
        key = (manifest.kind, meta.namespace, meta.name)
        if key in objects:
            problems.append(Problem(document, "metadata.name", "stands twice: remove or rename one of them"))
            continue
        objects.add(key)
        for name in manifest.served_names if isinstance(manifest, ModelDeployment) else ():
            owner = claims.setdefault((meta.namespace, name), meta.name)
            if owner != meta.name:
                path = "metadata.name" if name == meta.name else "spec.alias"
                message = f"{name!r} is already a name of ModelDeployment {owner!r}: choose another one"
                problems.append(Problem(document, path, message))
    return problems


def _flatten(documents: Iterable[object], source: str) -> Iterator[tuple[str, object]]:
    for index, document in enumerate(documents):
        place = f"{source}: document {index + 1}"
        if document is None:
            continue
        if isinstance(document, Mapping) and document.get("kind") == "List" and document.get("apiVersion") == "v1":
            items = document.get("items")
            if isinstance(items, list):
                yield from ((f"{place}, item {number + 1}", item) for number, item in enumerate(items))
                continue
        yield place, document


def _load_one(document: object, place: str) -> Manifest | list[Problem]:
    if not isinstance(document, Mapping):
        return [
            Problem(place, "", f"must be a mapping with apiVersion, kind, metadata and spec, got {_show(document)}")
        ]
    kind, api_version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or kind not in KINDS:
        return [Problem(place, "kind", f"{_show(kind)} is not one of {', '.join(KINDS)}: correct or remove it")]
    if api_version != API_VERSION:
        return [Problem(place, "apiVersion", f"{_show(api_version)} is not served: write {API_VERSION}")]
    try:
        return KINDS[kind].model_validate(document)
    except ValidationError as exc:
        name = _value_at(document, ("metadata", "name"))
        where = f"{place} ({kind} {name!r})" if isinstance(name, str) and len(name) < 254 else f"{place} ({kind})"
        return [problem for error in exc.errors() for problem in _problems(error, document, KINDS[kind], where)]


def _problems(error: ErrorDetails, document: Mapping[Any, Any], model: type[CrdModel], where: str) -> list[Problem]:
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == RULE_ERROR:
        violations = error["ctx"]["violations"]
        return [_rule_problem(location, field, message, document, where) for field, message in violations]
    path = _dotted(location)
    match error["type"]:
        case "missing":
            return [Problem(where, path, "is required: write it")]
        case "extra_forbidden":
            return [Problem(where, path, "is not a known field" + _suggestion(location, model))]
        case _:
            said = error["type"] == URI_ERROR or _may_be_secret(location)
            return [Problem(where, path, _describe(error) + ("" if said else f" (got {_show(error['input'])})"))]


def _rule_problem(
    location: tuple[int | str, ...], field: str, message: str, document: Mapping[Any, Any], where: str
) -> Problem:
    path = (*location, *field.split("."))
    value = _value_at(document, path)
    hidden = value is _ABSENT or _may_be_secret(path)
    return Problem(where, _dotted(path), message if hidden else f"{message} (got {_show(value)})")


_MESSAGES = {
    "literal_error": "must be one of {expected}",
    "string_type": "must be a text: put it in quotes",
    "int_type": "must be a whole number without quotes",
    "int_from_float": "must be a whole number without quotes",
    "float_type": "must be a number without quotes",
    "finite_number": "must be a number without quotes",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "tuple_type": "must be a list",
    "invalid_key": "must have texts as field names",
    "value_error": "{error}",
    URI_ERROR: "{text}",
    "string_pattern_mismatch": "must match {pattern}",
}
"""Pydantic's error types in our words; `{}` names take the error's context."""


def _describe(error: ErrorDetails) -> str:
    template = _MESSAGES.get(error["type"])
    if template is None:
        return error["msg"][:1].lower() + error["msg"][1:]
    return template.format_map(error.get("ctx", {}))


def _suggestion(location: tuple[int | str, ...], model: type[CrdModel]) -> str:
    """Names the nearest known field of the object the unknown one stands in."""
    known = _fields_at(model, location[:-1])
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(location[-1]).lower(), by_lower, n=1)
    if near:
        return f": did you mean {by_lower[near[0]]!r}?"
    return f": the fields here are {', '.join(known)}" if known else ": remove it"


def _fields_at(model: type[CrdModel], location: tuple[int | str, ...]) -> list[str]:
    schema = model.model_json_schema(by_alias=True)
    node: Any = schema
    for part in (*location, None):
        while "$ref" in node or "anyOf" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node["anyOf"][0]
        if part is not None:
            node = node.get("items" if isinstance(part, int) else "properties", {})
            node = node if isinstance(part, int) else node.get(part, {})
    return list(node.get("properties", {}))


def _value_at(document: Any, path: tuple[int | str, ...]) -> object:
    for part in path:
        if isinstance(document, Mapping) and part in document:
            document = document[part]
        elif isinstance(document, list) and isinstance(part, int) and part < len(document):
            document = document[part]
        else:
            return _ABSENT
    return document


def _dotted(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _may_be_secret(location: tuple[int | str, ...]) -> bool:
    return any(part in _SECRET_FIELDS for part in location)


def _show(value: object) -> str:
    """The value, cut to a line."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 200, 200
    return short.repr(value)
