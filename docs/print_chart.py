"""Prints what the chart takes from elsewhere: `make gen`; `--check` in `make verify`.

The table of values in the chart's README comes from the comments in values.yaml. The parts of values.schema.json that
speak of a WorkerPool's spec and of the settings of router and operator come from their own definitions; the rest is
written by hand. A development tool: it imports both, which no part may do.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from naru_operator import settings as operator_settings
from naru_proto import crdgen
from naru_proto.crd.worker_pool import WorkerPoolSpec
from naru_router import settings as router_settings

CHART = Path(__file__).parents[1] / "charts" / "naru"
SET_BY_CHART = {
    "router": (
        *("host", "http_port", "grpc_port", "redis_url", "drain_timeout_s", "log_level", "exit_with_parent"),
        *("tenants_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    ),
    "operator": (
        *("redis_url", "namespace", "watch_namespaces", "identity", "leader_election", "health_listen", "log_level"),
        *("worker_image", "worker_redis_secret", "worker_service_account", "worker_image_pull_policy"),
        "worker_template_file",
    ),
}
"""What `settings` of a part must not touch: other values of the chart, or the shape of its pod, say them."""

_MARK = "# -- "
_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):")
_SECTION = re.compile(r"(<!-- values, printed by `make gen` -->\n\n).*?(\n<!-- end -->)", re.DOTALL)
_JSON_TYPES: dict[str, str | list[str]] = {
    "str": "string",
    "int": "integer",
    "float": ["number", "string"],  # `helm --set` makes a text of 1.5
    "bool": "boolean",
}
_SCHEMA_WORDS = (
    *("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "required", "anyOf"),
)


def documented_values(text: str) -> Iterator[tuple[str, str]]:
    """Path and meaning of each value that a comment stands above of, in order."""
    path: list[tuple[int, str]] = []
    words: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(_MARK):
            words = [stripped.removeprefix(_MARK)]
        elif stripped.startswith("#") and words:
            words.append(stripped.removeprefix("#").strip())
        elif match := _KEY.match(line):
            indent = len(match[1])
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, match[2])]
            if words:
                yield ".".join(name for _, name in path), " ".join(words)
            words = []
        else:
            words = []


def value_rows(text: str) -> Iterator[str]:
    """One row of the table for each documented value."""
    values = yaml.safe_load(text)
    for path, meaning in documented_values(text):
        value: Any = values
        for name in path.split("."):
            value = value[name]
        shown = json.dumps(value, ensure_ascii=False)
        yield f"| `{path}` | `{shown}` | {meaning} |\n"


def printed_readme(readme: str, values: str) -> str:
    """The README with a fresh table."""
    table = "| value | default | meaning |\n|---|---|---|\n" + "".join(value_rows(values))
    return _SECTION.sub(lambda match: match[1] + table + match[2], readme)


def printed_schema(schema: str) -> str:
    """The schema with fresh parts."""
    parsed = json.loads(schema)
    for part, settings in (("router", router_settings.Settings), ("operator", operator_settings.Settings)):
        parsed["definitions"][f"{part}Settings"] = settings_schema(settings, SET_BY_CHART[part])
    parsed["definitions"]["workerPoolSpec"] = strict(crdgen.structural(WorkerPoolSpec))
    return json.dumps(parsed, indent=2, ensure_ascii=False) + "\n"


def settings_schema(settings: type[Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    """Names and types of a part's settings."""
    fields = (field for field in dataclasses.fields(settings) if field.name not in left_out)
    properties = {field.name: {"type": _JSON_TYPES[str(field.type)]} for field in fields}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def strict(node: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON schema that refuses unknown fields, which an API server would only drop."""
    schema = {word: node[word] for word in _SCHEMA_WORDS if word in node}
    if "properties" in node:
        schema["additionalProperties"] = False
        schema["properties"] = {name: strict(child) for name, child in node["properties"].items()}
    elif isinstance(node.get("additionalProperties"), dict):
        schema["additionalProperties"] = strict(node["additionalProperties"])
    if "items" in node:
        schema["items"] = strict(node["items"])
    return schema


def printed_files() -> dict[Path, str]:
    """Every file and its fresh text."""
    readme, schema, values = (CHART / name for name in ("README.md", "values.schema.json", "values.yaml"))
    return {
        readme: printed_readme(readme.read_text(encoding="utf-8"), values.read_text(encoding="utf-8")),
        schema: printed_schema(schema.read_text(encoding="utf-8")),
    }


def main(arguments: list[str]) -> int:
    """Prints or checks; 1 when a file is stale."""
    stale = {path: text for path, text in printed_files().items() if path.read_text(encoding="utf-8") != text}
    if "--check" in arguments:
        sys.stderr.writelines(f"charts/naru/{path.name} is stale: run `make gen`\n" for path in stale)
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
