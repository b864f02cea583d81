"""How lists of files and batches are asked for, and what they look like. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import shown

_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Listing:
    """Which of the records."""

    limit: int
    after: str = ""
    """Id of the last one that was seen; empty: from the beginning."""
    is_ascending: bool = False


def read_query(target: bytes) -> dict[str, str]:
    """The parameters behind the `?` of a request's target; of one that stands twice the last one counts."""
    try:
        return dict(parse_qsl(target.partition(b"?")[2].decode("ascii", "replace"), max_num_fields=64))
    except ValueError as exc:
        raise InvalidRequest(f"the query cannot be read: {exc}") from exc


def read_listing(query: Mapping[str, str], *, usual: int, most: int) -> Listing:
    """Reads `limit`, `after` and `order`.

    Raises:
        InvalidRequest: naming the parameter.
    """
    text = query.get("limit", str(usual))
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= most:
        raise InvalidRequest(f"limit is {shown(text)}; it must be an integer in [1, {most}]", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {shown(order)}; it must be asc or desc", param="order")
    return Listing(int(text), query.get("after", ""), order == "asc")


def page_of(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }
