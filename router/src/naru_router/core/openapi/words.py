"""Short words for JSON Schema, so that a description reads like a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Schema = dict[str, object]


def text(about: str = "", **more: object) -> Schema:
    """A string."""
    return _with(about, {"type": "string", **more})


def boolean(about: str = "") -> Schema:
    """True or false."""
    return _with(about, {"type": "boolean"})


def integer(low: int | None = None, high: int | None = None, about: str = "") -> Schema:
    """A whole number in [low, high]."""
    return _with(about, {"type": "integer", **_range(low, high)})


def number(low: float | None = None, high: float | None = None, about: str = "") -> Schema:
    """A number in [low, high]."""
    return _with(about, {"type": "number", **_range(low, high)})


def one_of(*values: str, about: str = "") -> Schema:
    """One of some texts."""
    return _with(about, {"type": "string", "enum": list(values)})


def array(items: Schema, about: str = "", *, least: int = 0, most: int | None = None) -> Schema:
    """A list."""
    limits: Schema = {"minItems": least} if least else {}
    if most is not None:
        limits["maxItems"] = most
    return _with(about, {"type": "array", "items": items, **limits})


def thing(
    fields: Mapping[str, Schema], required: Sequence[str] = (), about: str = "", *, is_open: bool = True
) -> Schema:
    """An object; an open one may have more fields, which are ignored."""
    schema: Schema = {"type": "object", "properties": dict(fields)}
    if required:
        schema["required"] = list(required)
    if not is_open:
        schema["additionalProperties"] = False
    return _with(about, schema)


def free(about: str = "") -> Schema:
    """Any object."""
    return _with(about, {"type": "object"})


def either(*schemas: Schema, about: str = "") -> Schema:
    """Any of several."""
    return _with(about, {"anyOf": list(schemas)})


def null_or(schema: Schema) -> Schema:
    """The same, or null: as good as absent."""
    about = schema.get("description")
    bare = {key: value for key, value in schema.items() if key != "description"}
    kind = bare.get("type")
    if isinstance(kind, str) and "enum" not in bare:
        made: Schema = {**bare, "type": [kind, "null"]}
    else:
        made = {"anyOf": [bare, {"type": "null"}]}
    return {**made, "description": about} if about else made


def all_null(fields: Mapping[str, Schema], but: Sequence[str] = ()) -> dict[str, Schema]:
    """Fields of which each may be null, but for some."""
    return {name: schema if name in but else null_or(schema) for name, schema in fields.items()}


def ref(name: str) -> Schema:
    """A schema of the description's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def _range(low: float | None, high: float | None) -> Schema:
    limits: Schema = {} if low is None else {"minimum": low}
    return limits if high is None else {**limits, "maximum": high}


def _with(about: str, schema: Schema) -> Schema:
    return {**schema, "description": about} if about else schema
