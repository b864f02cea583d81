"""Dynamo's KV router with KV events: prefill blocks to compute plus blocks that decode, and the least of both.

Source: NVIDIA Dynamo, https://github.com/ai-dynamo/dynamo (kv_router), in words and code of our own, with its defaults:
overlap weight 1, temperature 0, block reuse among active requests assumed, no replica sync. Left out: host and disk
tiers, the approximate mode without events, the queue before the router, and growth of output blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.fleet_sim.cache import KeyLog
from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.prompts import BLOCK_TOKENS
from bench.fleet_sim.requests import Request

OVERLAP_WEIGHT = 1.0


@dataclass(slots=True)
class ToldBlocks:
    """Mutable: blocks of one worker as its events tell, late by the network."""

    log: KeyLog
    known: set[int] = field(default_factory=set)
    _num_read: int = 0

    def read(self, until_s: float) -> None:
        """Takes the events that have come."""
        times_s, changes = self.log.times_s, self.log.changes
        while self._num_read < len(times_s) and times_s[self._num_read] <= until_s:
            entered, block = changes[self._num_read]
            if entered:
                self.known.add(block)
            else:
                self.known.discard(block)
            self._num_read += 1

    def matched(self, blocks: Sequence[int]) -> int:
        """Leading blocks it holds."""
        return next((index for index, block in enumerate(blocks) if block not in self.known), len(blocks))


@dataclass(slots=True)
class Active:
    """Mutable: this router's requests on one worker."""

    prefill_tokens: int = 0
    """Uncached prompt tokens of requests without a first token."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Distinct blocks of open requests, with how many hold each."""
    tails: int = 0
    """Partly filled last blocks, which nobody shares."""

    def add(self, blocks: Sequence[int], num_uncached: int) -> None:
        """A request is sent."""
        self.prefill_tokens += num_uncached
        self.tails += 1
        for block in blocks:
            self.blocks[block] = self.blocks.get(block, 0) + 1

    def remove(self, blocks: Sequence[int]) -> None:
        """It has ended."""
        self.tails -= 1
        for block in blocks:
            count = self.blocks[block] - 1
            if count:
                self.blocks[block] = count
            else:
                del self.blocks[block]

    def decode_blocks_with(self, blocks: Sequence[int]) -> int:
        """Distinct blocks when one more request is there."""
        return len(self.blocks) + self.tails + 1 + sum(block not in self.blocks for block in blocks)


def cost(active: Active, blocks: Sequence[int], num_tokens: int, num_matched: int) -> float:
    """In blocks."""
    uncached = max(0, num_tokens - num_matched * BLOCK_TOKENS)
    prefill_blocks = (active.prefill_tokens + uncached) / BLOCK_TOKENS
    return OVERLAP_WEIGHT * prefill_blocks + active.decode_blocks_with(blocks)


class Dynamo(Policy):
    """Each router knows all caches from events, and only its own requests."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._told = [ToldBlocks(engine.cache.blocks) for engine in around.engines]
        self._active = [Active() for _ in around.engines]
        self._uncached: dict[int, int] = {}

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The least cost; one of equals by chance."""
        prompt = request.prompt
        matched = {}
        for worker in candidates:
            self._told[worker].read(now_s - self.around.network_s)
            matched[worker] = self._told[worker].matched(prompt.blocks)
        worker = self.around.least(
            candidates, lambda index: cost(self._active[index], prompt.blocks, prompt.num_tokens, matched[index])
        )
        num_uncached = max(0, prompt.num_tokens - matched[worker] * BLOCK_TOKENS)
        self._uncached[request.number] = num_uncached
        self._active[worker].add(prompt.blocks, num_uncached)
        request.expected_cached_tokens = prompt.num_tokens - num_uncached
        return worker

    def on_first_token(self, request: Request, now_s: float) -> None:
        """Its prompt is computed."""
        self._active[request.worker].prefill_tokens -= self._uncached.pop(request.number)

    def on_end(self, request: Request, now_s: float) -> None:
        """Its blocks are free."""
        self._active[request.worker].remove(request.prompt.blocks)
