"""Where a JSON Schema is none: the first place at which something else stands than the standard asks for. And what the
grammar library takes too lightly, written out.

Used by the grammar compiler, for a reason that names the place, before the library sees a schema. It looks at nothing
but shapes and dates; what a schema means is the library's affair.
"""

from __future__ import annotations

import json
from typing import Any

_OF_SCHEMA = frozenset(
    (
        *("additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_OF_SCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_OF_NAMES = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MAX_QUOTED_CHARS = 60
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
DATE = f"^({_YEAR}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
"""Beginning of a date, where days fit their months: 29 February is there in leap years alone, and year 0 is not."""


def fault_of_schema(schema: Any) -> str:
    """What is wrong and where, in a few words; empty: every part that should be a schema has the shape of one."""
    return _walk(schema, [])


def make_dates_exact(schema: Any) -> bool:
    """Changes a schema without fault so that its dates are those of the calendar. False: it has none."""
    parts: list[dict[str, Any]] = []
    _walk(schema, parts)
    dated = [part for part in parts if part.get("format") in ("date", "date-time")]
    for part in dated:
        part["allOf"] = [*part.get("allOf", ()), {"pattern": DATE}]
    return bool(dated)


def _walk(schema: Any, parts: list[dict[str, Any]]) -> str:
    """Adds all schemas to `parts` until there is a fault."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, item = left.pop()
        if isinstance(item, bool):
            continue
        if not isinstance(item, dict):
            return f"{path or 'the whole'} should be a schema (an object), and is {_quoted(item)}"
        parts.append(item)
        found: list[tuple[str, Any]] = []
        for key, value in item.items():
            place = f"{path}.{key}" if path else str(key)
            fault = _add_parts(key, place, value, found)
            if fault:
                return fault
        left += reversed(found)
    return ""


def _add_parts(key: str, place: str, value: Any, found: list[tuple[str, Any]]) -> str:
    """Adds the schemas under a keyword, or tells what is wrong with its value."""
    if key in _OF_SCHEMA or (key == "items" and not isinstance(value, list)):
        found.append((place, value))
    elif key in _OF_NAMES:
        if not isinstance(value, dict):
            return f"{place} should be an object of schemas, and is {_quoted(value)}"
        found += ((f"{place}.{name}", each) for name, each in value.items())
    elif key in _OF_SCHEMAS or key == "items":
        if not isinstance(value, list):
            return f"{place} should be a list of schemas, and is {_quoted(value)}"
        found += ((f"{place}[{number}]", each) for number, each in enumerate(value))
    elif key == "type":
        names = value if isinstance(value, list) else [value]
        if any(name not in _TYPES for name in names):
            return f"{place} should be of {', '.join(_TYPES)}, and is {_quoted(value)}"
    return ""


def _quoted(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}..."
