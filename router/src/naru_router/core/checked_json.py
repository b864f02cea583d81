"""Parts of a body that are JSON of any shape: checked once, so that they can be sent on, stored and shown again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import refuse
from naru_router.core.json_values import check_json


def json_text(path: str, value: object) -> str:
    """The value as JSON text.

    Raises:
        InvalidRequest: nested too deeply, an integer beyond 64 bits, or half of a surrogate pair inside.
    """
    check_json(path, value)
    try:
        return orjson.dumps(value).decode("utf-8")
    except orjson.JSONEncodeError as exc:
        raise InvalidRequest(f"{path} cannot be repeated: {exc}; send other values", param=path) from exc


def check_object(path: str, value: object) -> Mapping[str, Any]:
    """The value as a JSON object that can be sent on and shown again.

    Raises:
        InvalidRequest: another type, or see `json_text`.
    """
    if not isinstance(value, dict):
        refuse(path, value, "an object")
    json_text(path, value)
    return value


def check_texts(path: str, value: object, *, most: int, key_chars: int, value_chars: int) -> dict[str, str]:
    """The value as an object of short texts, as metadata is.

    Raises:
        InvalidRequest: another type, too many entries, or one that is too long.
    """
    wanted = f"an object of at most {most} texts of at most {value_chars} characters, keys of at most {key_chars}"
    found = check_object(path, value)
    if len(found) > most:
        refuse(path, value, wanted)
    for key, text in found.items():
        if len(key) > key_chars or not isinstance(text, str) or len(text) > value_chars:
            refuse(path, text, wanted)
    return dict(found)
