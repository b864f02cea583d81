"""JSON Schemas of moderate size, the same for the same seed, and a strict validator for what they ask."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

_Schema = dict[str, Any]

NAMES = ("name", "id", "kind", "size", "when", "a b", 'qu"ote', "ünïcode", "x-1", "tags")
PATTERNS = (r"^[a-z]{2,6}$", r"^[A-Z]{3}-[0-9]{2}$", r"^(on|off|auto)$", r"^[0-9a-f]{4}(:[0-9a-f]{4}){1,2}$")
FORMATS = ("date", "ipv4", "uuid")
"""Those whose text has an end: fractions of a second and names in addresses may have any length."""


def random_schema(seed: int) -> _Schema:
    """An object at the top in two of three, as most clients want."""
    rng = random.Random(seed)
    schema = _object(rng, 3) if rng.random() < 0.66 else _any(rng, 3)
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {"first": {"$ref": "#/$defs/part"}, "more": _list_of_parts(rng)}}
        schema |= {"required": ["first"], "additionalProperties": False, "$defs": {"part": _any(rng, 2)}}
    return schema


def validator_of(schema: _Schema) -> Draft202012Validator:
    """Checks formats, too."""
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def _list_of_parts(rng: random.Random) -> _Schema:
    return {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": rng.randint(1, 2)}


def _any(rng: random.Random, depth: int) -> _Schema:
    makers: list[Callable[[random.Random, int], _Schema]] = [_string, _string, _number, _fixed, _plain]
    if depth > 0:
        makers += [_object, _object, _array, _union, _all_of]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> _Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: _Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    return schema


def _array(rng: random.Random, depth: int) -> _Schema:
    least = rng.randint(0, 2)
    schema: _Schema = {"type": "array", "items": _any(rng, depth - 1), "minItems": least}
    schema["maxItems"] = least + rng.randint(0, 2)
    if rng.random() < 0.25:
        schema |= {"prefixItems": [_any(rng, 0)], "minItems": 1, "maxItems": 2}
    return schema


def _string(rng: random.Random, depth: int) -> _Schema:
    kind = rng.randint(0, 3)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}


def _number(rng: random.Random, depth: int) -> _Schema:
    low = rng.randint(-50, 50)
    high = low + rng.randint(0, 500)
    kind = rng.randint(0, 3)
    if kind == 0:
        return {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1}
    if kind == 1:
        # Without a step it may have any number of digits: no end that a model must find.
        return {"type": "number", "minimum": low, "maximum": high, "multipleOf": 0.25}
    if kind == 2:
        return {"type": "integer", "multipleOf": rng.choice((2, 5, 10)), "minimum": 0, "maximum": 1000}
    return {"type": "integer", "minimum": 0, "maximum": 9}


def _fixed(rng: random.Random, depth: int) -> _Schema:
    values = [None, True, 3, -1.5, "x", 'say "hi"\n', "", {"a": [1, "b"]}, [], ["é", 2]]
    if rng.random() < 0.4:
        return {"const": rng.choice(values)}
    return {"enum": rng.sample(values, rng.randint(1, 5))}


def _plain(rng: random.Random, depth: int) -> _Schema:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _union(rng: random.Random, depth: int) -> _Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _all_of(rng: random.Random, depth: int) -> _Schema:
    low = rng.randint(0, 9)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(0, 90)}]}
