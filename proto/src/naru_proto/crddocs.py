"""Prints the reference page of a custom resource from its structural schema.

Called by `python -m naru_proto` and tests. Pure: models in, Markdown out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from naru_proto import names
from naru_proto.crd.base import VALIDATIONS, CrdModel
from naru_proto.crdgen import crd_names, root_schema

_HEADER = "<!-- Printed by `make gen` from the models in naru_proto.crd. Do not edit. -->"


def reference_page(model: type[CrdModel]) -> str:
    """The Markdown reference of a kind: one table for each object, rules below it."""
    naming = crd_names(model)
    schema = root_schema(model)
    lines = [
        f"# {model.__name__}",
        "",
        _HEADER,
        "",
        schema["description"],
        "",
        f"`apiVersion: {names.API_GROUP}/{names.API_VERSION}`, `kind: {model.__name__}`, short name "
        f"`{naming['shortNames'][0]}`. An API server and `naru up` check the same ranges and rules. Which fields "
        "something acts on today stands under [known flaws](../architecture.md#known-flaws).",
        "",
        'A duration is a text with units (`"90s"`, `"5m"`, `"1h30m"`, `"250ms"`), a quantity a number of bytes '
        '(`"8Gi"`, `"1.5G"`, `1073741824`) or an amount, a time RFC 3339.',
        "",
        *_rules(schema),
    ]
    for part in ("spec", "status"):
        for path, node in _objects(part, schema["properties"][part]):
            lines += _section(path, node)
    return "\n".join(lines).rstrip() + "\n"


def _objects(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object and all objects inside it, outermost first."""
    yield path, node
    for name, child in node["properties"].items():
        inner, suffix = (child["items"], "[]") if child.get("type") == "array" else (child, "")
        if "properties" in inner:
            yield from _objects(f"{path}.{name}{suffix}", inner)


def _section(path: str, node: dict[str, Any]) -> list[str]:
    lines = [f"## {path}", "", node["description"], "", "| field | type | default | meaning |", "|---|---|---|---|"]
    required = node.get("required", ())
    for name, child in node["properties"].items():
        default = "**required**" if name in required else _default(child)
        lines.append(f"| `{name}` | {_type(child)} | {default} | {_meaning(child)} |")
    return [*lines, "", *_rules(node)]


def _rules(node: dict[str, Any]) -> list[str]:
    rules = [f"- Rule: {rule['message']}." for rule in node.get(VALIDATIONS, ())]
    return [*rules, ""] if rules else []


def _default(node: dict[str, Any]) -> str:
    default = node.get("default")
    if default in (None, "") or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(node: dict[str, Any]) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if node.get("format") == "date-time":
        return "time"
    if node.get("type") == "string" and "duration(" in "".join(rule["rule"] for rule in node.get(VALIDATIONS, ())):
        return "duration"
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map to {_type(node['additionalProperties'])}"
    return str(node["type"])


def _meaning(node: dict[str, Any]) -> str:
    text: str = node["description"].replace("|", "\\|")
    if "enum" in node:
        text += " One of " + ", ".join(f"`{value}`" for value in node["enum"]) + "."
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        text += f" {low:g} to {high:,}." if high >= 10**6 else f" {low:g} to {high:g}."
    elif low is not None:
        text += f" At least {low:g}."
    return text
