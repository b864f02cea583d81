"""Stored responses: what is kept of one, what goes on from it, and its input in pages. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import shown

KIND = "responses"
"""In the store."""
MAX_PAGE = 100
DEFAULT_PAGE = 20
_ID = re.compile(r"resp_[0-9a-f]{24}")


def is_response_id(text: str) -> bool:
    """Whether a response may have this id."""
    return _ID.fullmatch(text) is not None


def record_of(response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is kept: the response, and all that it answers, items of earlier responses included."""
    return {"id": response["id"], "response": response, "input": list(items)}


def items_after(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a call has before its own input that goes on from a stored response."""
    return [*record["input"], *record["response"]["output"]]


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, object]:
    """A page of input items, newest first unless `order` is asc.

    Raises:
        InvalidRequest: naming the parameter.
    """
    limit, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after", "")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise InvalidRequest(f"limit is {shown(limit)}; it must be an integer in [1, {MAX_PAGE}]", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {shown(order)}; it must be asc or desc", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest(f"after is {shown(after)}; no input item has that id", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
