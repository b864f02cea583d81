"""Reply headers that tell a tenant what is left of its quotas, in OpenAI's form. Made for the edges by the tenancy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from naru_router.core.tenancy.quota import Share

Headers = list[tuple[bytes, bytes]]


def rate_headers(shares: Iterable[tuple[str, int, Share]], now_s: float) -> Headers:
    """Three headers for each quota over time: x-ratelimit-limit-…, -remaining-… and -reset-…"""
    headers: Headers = []
    for what, limit, share in shares:
        numbers = (
            ("limit", str(limit)),
            ("remaining", str(min(limit, share.remaining(now_s)))),
            ("reset", duration(share.reset_s(now_s))),
        )
        headers += [(f"x-ratelimit-{kind}-{what}".encode(), value.encode()) for kind, value in numbers]
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 120ms, 0s."""
    if seconds < 1:
        millis = math.ceil(seconds * 1000)
        return f"{millis}ms" if millis else "0s"
    tenths = math.ceil(seconds * 10)
    minutes, tenths = divmod(tenths, 600)
    text = f"{tenths / 10:g}s"
    return f"{minutes}m{text}" if minutes else text
