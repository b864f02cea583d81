"""llm-d's default scorers with the approximate prefix index: queue 2, KV utilisation 2, prefix 3.

Source: llm-d inference scheduler and Gateway API Inference Extension, https://github.com/llm-d/llm-d-inference-scheduler
(scorers, approximate prefix index), in words and code of our own. Left out: filters that are off by default, tuning of
the index's size from a pod's metrics, admission and flow control.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.requests import Request

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0
MAX_BLOCKS = 256
"""Of a prompt: 16 tokens of 4 characters each; what follows is not looked at."""
BLOCKS_PER_POD = 31_250
SCRAPE_S = 0.05


def prefix_blocks(request: Request) -> tuple[int, ...]:
    """Blocks of 64 characters, the last partial one included."""
    prompt = request.prompt
    blocks = (*prompt.blocks, prompt.tail) if prompt.tail else prompt.blocks
    return blocks[:MAX_BLOCKS]


class PrefixIndex:
    """Mutable: what each pod was sent, the latest so many blocks of it."""

    def __init__(self, blocks_per_pod: int = BLOCKS_PER_POD) -> None:
        self._blocks_per_pod = blocks_per_pod
        self._pods: dict[int, OrderedDict[int, None]] = {}

    def matched(self, blocks: Sequence[int], pod: int) -> int:
        """Leading blocks that the pod was sent."""
        known = self._pods.get(pod, OrderedDict())
        return next((index for index, block in enumerate(blocks) if block not in known), len(blocks))

    def add(self, blocks: Sequence[int], pod: int) -> None:
        """After routing: the pod is taken to cache them all."""
        known = self._pods.setdefault(pod, OrderedDict())
        for block in blocks:
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._blocks_per_pod:
            known.popitem(last=False)


def queue_scores(queues: Mapping[int, int]) -> dict[int, float]:
    """1 for the shortest, 0 for the longest; 1 for all where they are equal."""
    low, high = min(queues.values()), max(queues.values())
    return {pod: 1.0 if high == low else 1.0 - (queue - low) / (high - low) for pod, queue in queues.items()}


class LlmD(Policy):
    """Each scheduler has an index of its own, and scrapes queue and KV usage."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._index = PrefixIndex()

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The highest weighted sum; one of equals by chance."""
        around, blocks = self.around, prefix_blocks(request)
        reports = {worker: around.scraped(worker, now_s, SCRAPE_S) for worker in candidates}
        queues = queue_scores({worker: report.num_waiting for worker, report in reports.items()})
        matched = {worker: self._index.matched(blocks, worker) / max(1, len(blocks)) for worker in candidates}

        def cost(worker: int) -> float:
            kv_score = 1.0 - reports[worker].kv_usage
            return -(QUEUE_WEIGHT * queues[worker] + KV_WEIGHT * kv_score + PREFIX_WEIGHT * matched[worker])

        worker = around.least(candidates, cost)
        self._index.add(blocks, worker)
        return worker
