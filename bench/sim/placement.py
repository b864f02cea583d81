"""Which worker of a simulated fleet serves a model. For now by consistent hashing; a router's placement fits in here.

Called by the fleet for each request. Pure: the same name and workers give the same answer in every process.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from typing import Protocol


class Placement(Protocol):
    """Chooses a worker for a model."""

    def place(self, model: str) -> int:
        """Index of the worker."""
        ...


class HashRing:
    """Consistent hashing of the model's name.

    Source: Karger et al., "Consistent hashing and random trees", STOC 1997.
    """

    def __init__(self, workers: Sequence[str], num_points: int = 64) -> None:
        """`num_points`: points on the ring for each worker; more make shares more even."""
        if not workers:
            raise ValueError("a ring of no workers places nothing; give at least one")
        self._points = sorted(
            (_position(f"{worker}#{point}"), index)
            for index, worker in enumerate(workers)
            for point in range(num_points)
        )

    def place(self, model: str) -> int:
        """The first worker clockwise from the name's position."""
        at = bisect.bisect_left(self._points, (_position(model), -1))
        return self._points[at % len(self._points)][1]


def _position(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
