"""JSON values of requests that go on as they are: into chat templates, grammars, schemas. Used by request parsers."""

from __future__ import annotations

import math

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import check_text, refuse

MAX_DEPTH = 64
"""Of objects and arrays in one another: what takes them apart does so by recursion."""
MAX_INTEGER_BITS = 1024


def check_json(path: str, value: object) -> object:
    """The value, where everything in it can be printed again: whole texts, finite numbers, not too deep.

    Raises:
        InvalidRequest: naming the place.
    """
    pending: list[tuple[str, object, int]] = [(path, value, 0)]
    while pending:
        at, item, depth = pending.pop()
        if isinstance(item, str):
            check_text(at, item)
        elif isinstance(item, (dict, list)):
            if depth >= MAX_DEPTH:
                raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH}; send a flatter value", param=path)
            if isinstance(item, dict):
                for key, child in item.items():
                    check_text(at, key)
                    pending.append((at, child, depth + 1))
            else:
                pending += [(at, child, depth + 1) for child in item]
        elif isinstance(item, float) and not math.isfinite(item):
            refuse(path, item, "made of finite numbers")
        elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
            raise InvalidRequest(f"{path} holds an integer of more than {MAX_INTEGER_BITS} bits", param=path)
    return value
