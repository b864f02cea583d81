"""What one routing decision takes among many workers, models and keys. Called by `bench.router`.

The real index and the real `route`, in this process: the prompt's keys are looked up and the workers that have the
model ready are compared. Half of the decisions are for a model that is ready on every worker, the others for one on
four.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass

from bench.stats import percentile

from naru_proto.route_keys import boundaries, key_root, keys_of_text, pack_keys
from naru_router.core.prefix_index import PrefixIndex
from naru_router.core.routing.model import RouteRequest, WorkerView
from naru_router.core.routing.route import route

NUM_WORKERS = 100
NUM_MODELS = 1000
NUM_KEYS = 100_000
"""(worker, key) pairs in the index."""
NUM_COPIES = 4
NUM_DECISIONS = 4000
PROMPT_BYTES = 4096
BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """Seconds of one decision."""

    p50_s: float
    p99_s: float


class _World:
    """Workers, who has which model, and what their caches hold."""

    def __init__(self, dice: random.Random) -> None:
        self.workers = [f"pool-{i:03d}" for i in range(NUM_WORKERS)]
        self.homes = [self.workers, *(dice.sample(self.workers, NUM_COPIES) for _ in range(NUM_MODELS - 1))]
        self.index = PrefixIndex()
        self.views = {
            worker: WorkerView(
                worker,
                num_in_flight=dice.randrange(8),
                num_in_flight_all=dice.randrange(8, 16),
                waiting_tokens=dice.randrange(4000),
                prefill_tokens_per_s=dice.uniform(5e3, 9e3),
                decode_step_s=dice.uniform(0.01, 0.03),
            )
            for worker in self.workers
        }
        self.prompts = [self._fill(dice, number) for number in range(NUM_MODELS)]

    def _fill(self, dice: random.Random, number: int) -> tuple[bytes, ...]:
        """Puts a prompt of the model into some caches, cut at a random place in each; its keys."""
        model = f"model-{number}"
        text = f"{number} {dice.getrandbits(64)} ".ljust(PROMPT_BYTES, "x")
        keys = keys_of_text(text.encode(), key_root(b"", model))
        homes = self.homes[number]
        share = NUM_KEYS / (2 * NUM_WORKERS) if number == 0 else NUM_KEYS / (2 * (NUM_MODELS - 1) * NUM_COPIES)
        for worker in homes:
            held = keys[: dice.randint(0, min(len(keys), round(2 * share)))]
            filler = [dice.randbytes(16) for _ in range(max(0, round(share) - len(held)))]
            self.index.update(worker, model, 1, is_snapshot=True, added=pack_keys((*held, *filler)))
        return keys


def measure() -> DecisionTimes:
    """Times decisions one by one."""
    dice = random.Random(1)
    world = _World(dice)
    key_tokens = tuple(int(end / BYTES_PER_TOKEN) for end in boundaries(PROMPT_BYTES))
    times_s = []
    gc.collect()
    gc.freeze()
    for turn in range(NUM_DECISIONS):
        number = 0 if turn % 2 else dice.randrange(NUM_MODELS)
        keys = world.prompts[number]
        views = [world.views[worker] for worker in world.homes[number]]
        ring_key = dice.randbytes(16)
        start_s = time.perf_counter()
        cached = world.index.match(f"model-{number}", keys)
        request = RouteRequest(ring_key, PROMPT_BYTES // 4, key_tokens, cached_keys=cached, seed=b"bench")
        route(views, request)
        times_s.append(time.perf_counter() - start_s)
    gc.unfreeze()
    return DecisionTimes(percentile(times_s, 50), percentile(times_s, 99))
