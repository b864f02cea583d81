"""AIBrix's `prefix-cache` routing in local mode: a table of small blocks with the pods they were sent to.

Source: AIBrix, https://github.com/vllm-project/aibrix (gateway plugin, prefix_cache and prefixcacheindexer), in words
and code of our own. Left out: other tokenizers than `character`, the sync of the table over Redis (off by default), and
that counts flip between local and global for some milliseconds.
"""

from __future__ import annotations

import statistics
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.requests import Request

BLOCK_BYTES = 4
MAX_BLOCKS = 200_000
TTL_S = 20 * 60.0
MAX_SPREAD = 8
"""Of running requests; above it only the least loaded pods count."""
NUM_DEVIATIONS = 1.0


class BlockTable:
    """Mutable: hash of a block and all before it → pod → last access."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._pods: OrderedDict[int, dict[int, float]] = OrderedDict()

    def match_percent(self, hashes: Sequence[int], pods: Iterable[int], now_s: float) -> dict[int, int]:
        """Whole percent of the leading blocks by pod; pods without the first block are missing."""
        # A prompt's blocks are added right after: that they count as used now need not be noted twice.
        left, matched = set(pods), dict[int, int]()
        for index, key in enumerate(hashes):
            known = self._pods.get(key)
            if known is not None and now_s <= TTL_S and left <= known.keys():
                continue
            live = {pod for pod in left if known is not None and pod in known and now_s - known[pod] <= TTL_S}
            matched.update(dict.fromkeys(left - live, index))
            left = live
            if not left:
                break
        matched.update(dict.fromkeys(left, len(hashes)))
        return {pod: count * 100 // len(hashes) for pod, count in matched.items() if count}

    def add(self, hashes: Sequence[int], pod: int, now_s: float) -> None:
        """All blocks of a prompt are taken to be cached by the pod it went to."""
        table = self._pods
        for key in hashes:
            known = table.get(key)
            if known is None:
                table[key] = {pod: now_s}
            else:
                known[pod] = now_s
                table.move_to_end(key)
        while len(table) > self._max_blocks:
            table.popitem(last=False)


@lru_cache(maxsize=8192)
def block_hashes(text: bytes) -> array[int]:
    """Chained over blocks of four bytes; a last partial block is dropped."""
    whole = memoryview(text)[: len(text) // BLOCK_BYTES * BLOCK_BYTES].cast("I")
    hashes, parent = array("q"), 0
    for word in whole:
        parent = hash((parent, word))
        hashes.append(parent)
    return hashes


def allowed(loads: Mapping[int, int]) -> list[int]:
    """All pods, or where their loads are further apart than the limit those with the least."""
    least = min(loads.values())
    if max(loads.values()) - least > MAX_SPREAD:
        return [pod for pod, load in loads.items() if load == least]
    return list(loads)


def pick(loads: Mapping[int, int], percent: Mapping[int, int]) -> int | None:
    """The best match that is not loaded above mean and one deviation of all pods; None: there is none."""
    limit = statistics.fmean(loads.values()) + NUM_DEVIATIONS * statistics.pstdev(loads.values())
    for pod in sorted(percent, key=lambda pod: (-percent[pod], loads[pod], pod)):
        if loads[pod] <= limit:
            return pod
    return None


class AIBrix(Policy):
    """Each gateway has a table of its own; counts are shared every 100 ms."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._tables: dict[str, BlockTable] = {}

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """Best match within the load limits, else fewest running requests."""
        around = self.around
        loads = {worker: around.board.shared(around.router, worker) for worker in candidates}
        hashes = block_hashes(request.prompt.text)
        table = self._tables.setdefault(request.prompt.model, BlockTable())
        worker = pick(loads, table.match_percent(hashes, allowed(loads), now_s))
        if worker is None:
            worker = around.least(candidates, lambda index: loads[index])
        table.add(hashes, worker, now_s)
        return worker
