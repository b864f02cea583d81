"""KubeAI's `PrefixHash` load balancing: consistent hashing of a prompt's beginning, with a bound on the load.

Source: KubeAI, https://github.com/kubeai-project/kubeai (internal/loadbalancer), in words and code of our own. Left
out: adapters, and its hash function (XXH64; here BLAKE2b, which spreads as evenly).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from functools import lru_cache

from bench.fleet_sim.policies.policy import Policy
from bench.fleet_sim.requests import Request

REPLICATION = 256
"""Points of each endpoint on the ring."""
MEAN_LOAD_PERCENT = 125
PREFIX_CHARS = 100


class KubeAI(Policy):
    """Each proxy process has a ring and counts of its own."""

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The first endpoint clockwise whose load is within the bound; else the very first one, whatever its load."""
        loads = {worker: self.around.in_flight[worker] for worker in candidates}
        return pick(loads, prefix_of(request))


def prefix_of(request: Request) -> str:
    """What is hashed: the beginning of the first user message. System prompts do not count."""
    return request.prompt.first_user_text[:PREFIX_CHARS]


def pick(loads: dict[int, int], prefix: str) -> int:
    """Walks the ring's points, not its endpoints: one that is full may be asked many times."""
    points, owners = _ring(tuple(loads))
    start = bisect.bisect_left(points, _hash(prefix))
    for step in range(len(points)):
        worker = owners[(start + step) % len(points)]
        if load_is_ok(loads[worker], sum(loads.values()), len(loads)):
            return worker
    return owners[start % len(points)]


def load_is_ok(load: int, total: int, num_endpoints: int) -> bool:
    """The candidate's own load is not counted one further, so that it may end one above the bound."""
    if total == 0:
        return True
    return load <= (total + 1) / num_endpoints * MEAN_LOAD_PERCENT / 100


@lru_cache(maxsize=256)
def _ring(workers: tuple[int, ...]) -> tuple[list[int], list[int]]:
    pairs = sorted((_hash(f"worker-{worker}{point}"), worker) for worker in workers for point in range(REPLICATION))
    return [position for position, _ in pairs], [worker for _, worker in pairs]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
