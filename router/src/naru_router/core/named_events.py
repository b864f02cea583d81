"""Server-sent events that have a name beside their data, as the Responses and the Messages API send them."""

from __future__ import annotations

from collections.abc import Mapping

from naru_router.core.sse import dump, event


def named_event(data: Mapping[str, object]) -> bytes:
    """One event, named by the `type` of its data."""
    return b"event: %b\n%b" % (str(data["type"]).encode("ascii"), event(dump(data)))
