"""Where a request goes: consistent hashing with bounded loads over the workers that can serve it.

The classic form: with m requests in flight on n workers, a worker may hold up to ceil(c * (m + 1) / n); the request
goes to the first worker clockwise from its key that stays within. Some worker always does, as the capacities sum to
more than m. Equal keys meet on one worker (its prefix cache), and no worker is more than c times the mean.

Pure: the same snapshot and request give the same decision, whatever the order of the workers.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), https://arxiv.org/abs/1608.01350
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

DEFAULT_LOAD_FACTOR = 1.25
"""c: a quarter above the mean, the value of the paper's own deployment."""
DEFAULT_NUM_VIRTUAL_NODES = 128
"""Points of each worker on the ring: shares differ by about 1/sqrt(128) = 9 %."""
KEY_PREFIX_CHARS = 256
"""Of a plain prompt: enough to tell documents apart, short enough that a growing prompt keeps its place."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can serve the request now."""

    worker_id: str
    num_in_flight: int
    """Requests this router has open there."""


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What of a request decides its place."""

    key: bytes
    """Equal for requests that share a prefix worth keeping together."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker and why."""

    worker_id: str
    capacity: int
    """Most requests the worker may hold, this one included."""
    num_skipped: int
    """Workers nearer to the key that were full."""
    reasons: tuple[str, ...]


def route(
    candidates: Sequence[Candidate],
    request: RouteRequest,
    *,
    load_factor: float = DEFAULT_LOAD_FACTOR,
    num_virtual_nodes: int = DEFAULT_NUM_VIRTUAL_NODES,
) -> Decision:
    """Picks one of at least one candidate with distinct ids.

    Args:
        candidates: in any order.
        request: see RouteRequest.
        load_factor: c, at least 1.
        num_virtual_nodes: points of each worker on the ring.
    """
    assert candidates, "the caller answers when nobody can serve"
    loads = {c.worker_id: c.num_in_flight for c in candidates}
    capacity = math.ceil(load_factor * (sum(loads.values()) + 1) / len(loads))
    num_skipped = 0
    for worker_id in _walk(tuple(sorted(loads)), request.key, num_virtual_nodes):
        if loads[worker_id] + 1 <= capacity:
            reasons = (
                f"hash order {num_skipped + 1} of {len(loads)}",
                f"in flight {loads[worker_id]} below capacity {capacity}",
            )
            return Decision(worker_id, capacity, num_skipped, reasons)
        num_skipped += 1
    raise AssertionError("capacities sum to more than the load, so one worker has room")


def route_key(model: str, parts: Sequence[str | bytes]) -> bytes:
    """The key of a request on a model; parts are hashed with their lengths, so that borders count."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, *parts):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def _walk(worker_ids: tuple[str, ...], key: bytes, num_virtual_nodes: int) -> list[str]:
    """Distinct workers clockwise from the key."""
    points, owners = _ring(worker_ids, num_virtual_nodes)
    start = bisect.bisect_left(points, _point(key))
    order = dict.fromkeys(owners[start:])
    if len(order) < len(worker_ids):
        order.update(dict.fromkeys(owners[:start]))
    return list(order)


@lru_cache(maxsize=64)
def _ring(worker_ids: tuple[str, ...], num_virtual_nodes: int) -> tuple[list[int], list[str]]:
    # Sorting pairs breaks a collision of points by name.
    pairs = sorted((_point(f"{i}:{w}".encode()), w) for w in worker_ids for i in range(num_virtual_nodes))
    return [point for point, _ in pairs], [worker for _, worker in pairs]


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
