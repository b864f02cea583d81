"""Strict JSON from untrusted bytes. Called by the HTTP edge before anything looks at a request.

Stricter than `json.loads`: one object, no duplicate keys, no NaN or Infinity. Does not look at the meaning of fields.
"""

from __future__ import annotations

import json
from typing import NoReturn

from naru_proto.errors import InvalidRequest

MAX_KEY_SHOWN_CHARS = 40


def parse_object(body: bytes) -> dict[str, object]:
    """Reads one JSON object.

    Raises:
        InvalidRequest: empty, not UTF-8, not JSON, not an object, a key twice, NaN or Infinity, or nested too deeply.
    """
    if not body:
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the body is not UTF-8: byte {exc.start} is {body[exc.start]:#04x}") from exc
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc.msg} at line {exc.lineno} column {exc.colno}") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply; send a flatter JSON object") from exc
    except ValueError as exc:  # an integer of thousands of digits
        raise InvalidRequest(f"the body holds a number that cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is a JSON {_kind(value)}; send a JSON object")
    return value


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key[:MAX_KEY_SHOWN_CHARS]
                raise InvalidRequest(f"the body has the key {shown!r} twice in one object; keep one", param=shown)
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body holds {name}, which is not JSON; send a finite number")


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "array" if isinstance(value, list) else "string"
