"""Which of several models takes a request, by weight. Asked by the route map; the edges make the number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from naru_proto.registry import ModelRecord

_BITS = 53
"""Of a float's mantissa: every number is below 1."""


def pick_of(key: bytes, seed: bytes = b"") -> float:
    """A number in [0, 1) that is always the same for a key, in all routers that have the same seed."""
    digest = hashlib.blake2b(key, key=seed[:64], digest_size=8, person=b"naru-split").digest()
    return (int.from_bytes(digest, "big") >> (64 - _BITS)) / (1 << _BITS)


def pick_weighted(shares: Sequence[tuple[ModelRecord, int]], pick: float) -> ModelRecord | None:
    """The entry whose share of [0, 1) holds `pick`; None where no weight is above 0.

    Shares lie in the order given: when weights move from one neighbour to the other, few requests change sides.
    """
    total = sum(max(0, weight) for _, weight in shares)
    reached, found = 0, None
    for entry, weight in shares:
        if weight <= 0:
            continue
        reached, found = reached + weight, entry
        if pick * total < reached:
            return entry
    return found
