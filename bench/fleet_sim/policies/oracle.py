"""The oracle: knows every cache and every load of this instant, without delay, and takes the soonest first token.

Called by the fleet as a yardstick that no router can reach. It is greedy: it does not know what comes next, so another
policy may now and then have a higher hit ratio, at the price of a later token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.fleet_sim.engine import Engine
from bench.fleet_sim.policies.policy import Policy, Surroundings
from bench.fleet_sim.prompts import BLOCK_TOKENS
from bench.fleet_sim.requests import Request


@dataclass(slots=True)
class _Coming:
    """Mutable: what is on its way into one worker's cache."""

    blocks: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    """Prompt tokens to compute by request that has no token yet."""


class Oracle(Policy):
    """All routers share one view."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._coming: list[_Coming] = around.shared.setdefault("oracle", [_Coming() for _ in around.engines])

    def choose(self, request: Request, candidates: Sequence[int], now_s: float) -> int:
        """The soonest first token; of equals the most cached, then the least busy."""
        costs = {worker: self._cost(request, worker, now_s) for worker in candidates}
        worker = min(costs, key=lambda index: (*costs[index], index))
        num_uncached = costs[worker][1]
        coming = self._coming[worker]
        coming.tokens[request.number] = num_uncached
        for block in request.prompt.blocks:
            coming.blocks[block] = coming.blocks.get(block, 0) + 1
        request.expected_cached_tokens = request.prompt.num_tokens - num_uncached
        return worker

    def on_first_token(self, request: Request, now_s: float) -> None:
        """Its blocks are there."""
        coming = self._coming[request.worker]
        del coming.tokens[request.number]
        for block in request.prompt.blocks:
            count = coming.blocks[block] - 1
            if count:
                coming.blocks[block] = count
            else:
                del coming.blocks[block]

    def _cost(self, request: Request, worker: int, now_s: float) -> tuple[float, int, int]:
        engine, coming = self.around.engines[worker], self._coming[worker]
        num_uncached = request.prompt.num_tokens - self._num_known(request, engine, coming) * BLOCK_TOKENS
        num_begun = 0
        for other in engine.prefilling:
            num_begun += other.prompt.num_tokens - other.num_computed
        begun = {other.number for other in engine.prefilling}
        num_queued = sum(tokens for number, tokens in coming.tokens.items() if number not in begun)
        ahead = max(0.0, num_begun - engine.computed_since_step(now_s)) + num_queued
        machine, num_alive = engine.machine, engine.num_decoding + len(coming.tokens)
        seconds = machine.wait_s(ahead + num_uncached, engine.num_decoding)
        num_steps = engine.steps_until_places(num_alive + 1 - machine.max_sequences)
        seconds = max(seconds, num_steps * machine.decode_step_s(engine.num_decoding))
        return round(seconds, 6), num_uncached, num_alive

    @staticmethod
    def _num_known(request: Request, engine: Engine, coming: _Coming) -> int:
        most = (request.prompt.num_tokens - 1) // BLOCK_TOKENS
        for index, block in enumerate(request.prompt.blocks[:most]):
            if block not in engine.cache and block not in coming.blocks:
                return index
        return min(most, len(request.prompt.blocks))
