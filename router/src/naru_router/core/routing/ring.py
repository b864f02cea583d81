"""Where a request goes when nothing is known of caches: consistent hashing with bounded loads over the workers.

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
from collections.abc import Mapping, Sequence
from functools import lru_cache

from naru_router.core.routing.model import Decision

DEFAULT_LOAD_FACTOR = 1.25
"""c: a quarter above the mean, the value of the paper's own deployment."""
DEFAULT_NUM_VIRTUAL_NODES = 128
"""Points of each worker on the ring: shares differ by about 1/sqrt(128) = 9 %."""
_FULL = 1 << 64
"""The ring's length."""
_MAX_WORKERS_KEPT = 4096
KEY_PREFIX_CHARS = 256
"""Of a plain prompt: enough to tell documents apart, short enough that a growing prompt keeps its place."""


def bounded_hash(
    loads: Mapping[str, int],
    key: bytes,
    *,
    load_factor: float = DEFAULT_LOAD_FACTOR,
    num_virtual_nodes: int = DEFAULT_NUM_VIRTUAL_NODES,
) -> Decision:
    """Picks one of at least one worker.

    Args:
        loads: requests in flight by worker id.
        key: equal for what belongs together; mixed with the installation's seed by the caller.
        load_factor: c, at least 1.
        num_virtual_nodes: points of each worker on the ring.
    """
    assert loads, "the caller answers when nobody can serve"
    capacity = bound(sum(loads.values()), len(loads), load_factor)
    num_skipped = 0
    for worker_id in hash_order(tuple(loads), key, num_virtual_nodes):
        if loads[worker_id] + 1 <= capacity:
            reasons = (
                f"hash order {num_skipped + 1} of {len(loads)}",
                f"in flight {loads[worker_id]} below capacity {capacity}",
            )
            return Decision(worker_id, capacity, num_skipped, reasons)
        num_skipped += 1
    raise AssertionError("capacities sum to more than the load, so one worker has room")


def bound(num_in_flight: int, num_workers: int, load_factor: float) -> int:
    """Most requests one of the workers may hold, the next one included."""
    return math.ceil(load_factor * (num_in_flight + 1) / num_workers)


def route_key(model: str, parts: Sequence[str | bytes]) -> bytes:
    """The key of a request on a model; parts are hashed with their lengths, so that borders count."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, *parts):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()


def seeded(seed: bytes, key: bytes) -> bytes:
    """The key as all routers of one installation place it, and nobody outside can."""
    return route_key("", (seed, key)) if seed else key


def nearest(worker_ids: Sequence[str], key: bytes, num_virtual_nodes: int) -> str:
    """The first of at least one worker clockwise from the key."""
    positions = _positions(worker_ids, key, num_virtual_nodes)
    first = min(positions)
    if positions.count(first) > 1:
        return min(w for w, position in zip(worker_ids, positions, strict=True) if position == first)
    return worker_ids[positions.index(first)]


def hash_order(worker_ids: Sequence[str], key: bytes, num_virtual_nodes: int) -> list[str]:
    """Distinct workers clockwise from the key."""
    # Sorting pairs breaks a collision of points by name.
    return [w for _, w in sorted(zip(_positions(worker_ids, key, num_virtual_nodes), worker_ids, strict=True))]


def _positions(worker_ids: Sequence[str], key: bytes, num_virtual_nodes: int) -> list[int]:
    """Where clockwise from the key each worker's next point lies, counted on past the ring's end.

    There is no merged ring to build: for as many models with as many sets of workers as there may be, each worker has
    its points once.
    """
    start, find, points_of = _point(key), bisect.bisect_left, _points_by_worker(num_virtual_nodes)
    return [(points := points_of[worker_id])[find(points, start)] for worker_id in worker_ids]


class _PointsByWorker(dict[str, tuple[int, ...]]):
    """Worker id to its points and the first one once more, a turn later; made when first asked for."""

    def __init__(self, num_virtual_nodes: int) -> None:
        super().__init__()
        self._num_virtual_nodes = num_virtual_nodes

    def __missing__(self, worker_id: str) -> tuple[int, ...]:
        if len(self) >= _MAX_WORKERS_KEPT:
            self.clear()
        points = sorted(_point(f"{i}:{worker_id}".encode()) for i in range(self._num_virtual_nodes))
        self[worker_id] = found = (*points, points[0] + _FULL)
        return found


@lru_cache(maxsize=8)
def _points_by_worker(num_virtual_nodes: int) -> _PointsByWorker:
    return _PointsByWorker(num_virtual_nodes)


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
