"""Parts of a body that are JSON of any shape: checked once, so that they can be sent on, stored and shown again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import refuse
from naru_router.core.json_values import check_json

MAX_METADATA, MAX_KEY_CHARS, MAX_TEXT_CHARS = 16, 64, 512
_METADATA = (
    f"an object of at most {MAX_METADATA} texts of at most {MAX_TEXT_CHARS} characters, keys of at most {MAX_KEY_CHARS}"
)


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


def check_metadata(path: str, value: object) -> dict[str, str]:
    """The value as OpenAI's metadata: an object of short texts.

    Raises:
        InvalidRequest: another type, too many entries, or one that is too long.
    """
    found = check_object(path, value)
    if len(found) > MAX_METADATA:
        refuse(path, value, _METADATA)
    for key, text in found.items():
        if len(key) > MAX_KEY_CHARS or not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
            refuse(path, text, _METADATA)
    return dict(found)
