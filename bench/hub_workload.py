"""Which model is asked when: Zipf traffic over models, and what a cache of a given size could make of it. Pure.

A seed fixes the sequence and which models are the popular ones.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence


def zipf_sequence(num_models: int, num_requests: int, exponent: float, seed: int) -> tuple[int, ...]:
    """Model numbers: the one of popularity rank r comes with weight r**-exponent; ranks are dealt by the seed."""
    rng = random.Random(f"zipf {seed}")
    models = list(range(num_models))
    rng.shuffle(models)
    weights = itertools.accumulate((rank + 1) ** -exponent for rank in range(num_models))
    return tuple(rng.choices(models, cum_weights=list(weights), k=num_requests))


def lru_hit_ratio(sequence: Sequence[int], capacity: int) -> float:
    """Share of the sequence that a cache of `capacity` models finds there when the least recently used one leaves."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for model in sequence:
        if model in cached:
            hits += 1
            cached.move_to_end(model)
            continue
        cached[model] = None
        if len(cached) > capacity:
            cached.popitem(last=False)
    return hits / len(sequence)


def best_hit_ratio(sequence: Sequence[int], capacity: int) -> float:
    """The same when the one that is needed last leaves, which needs to know the future: no policy does better.

    Source: L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
    """
    never = len(sequence)
    next_use = [never] * never
    seen: dict[int, int] = {}
    for at in range(never - 1, -1, -1):
        next_use[at] = seen.get(sequence[at], never)
        seen[sequence[at]] = at
    cached: dict[int, int] = {}
    hits = 0
    for at, model in enumerate(sequence):
        hits += model in cached
        cached[model] = next_use[at]
        if len(cached) > capacity:
            del cached[max(cached, key=lambda other: cached[other])]
    return hits / len(sequence)
