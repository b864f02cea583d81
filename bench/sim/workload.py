"""Requests over time: which model, when, how long, how patient. Pure functions of a seeded generator.

Called by traces and scenarios. Times grow along each list; nothing here knows what a worker does with them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DAY_S = 86_400.0
LONGEST = 20.0
"""No drawn time or size is more than so many times its mean."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request on its way."""

    time_s: float
    model: int
    """Index into the catalog."""
    duration_s: float
    """Of its run, once it has begun."""
    max_wait_s: float
    """It leaves when it has not begun by then; infinite: it waits for an end, whatever it is."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How requests come."""

    num_requests: int
    rate_per_s: float
    mean_duration_s: float = 2.0
    max_wait_s: float = 60.0


def zipf_weights(num_models: int, exponent: float) -> list[float]:
    """Popularity by rank: the first is the most popular one. Source: G. K. Zipf, rank-frequency law."""
    return [1.0 / (rank + 1) ** exponent for rank in range(num_models)]


def poisson_times(rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Endless arrival times with independent exponential gaps."""
    time_s = 0.0
    while True:
        time_s += _exponential(1.0 / rate_per_s, rng)
        yield time_s


def zipf(num_models: int, demand: Demand, rng: random.Random, exponent: float = 1.0) -> list[Arrival]:
    """Poisson arrivals over models of Zipf popularity; which model is popular is drawn, not its index."""
    ranks = _shuffled(num_models, rng)
    cumulative = list(itertools.accumulate(zipf_weights(num_models, exponent)))
    times = itertools.islice(poisson_times(demand.rate_per_s, rng), demand.num_requests)
    return [_arrival(time_s, rng.choices(ranks, cum_weights=cumulative)[0], demand, rng) for time_s in times]


def shifting(
    num_models: int,
    demand: Demand,
    rng: random.Random,
    exponent: float = 1.0,
    period_s: float = DAY_S,
    shift: float = 0.1,
) -> list[Arrival]:
    """As `zipf`, but each period the popular models make room: ranks turn by that share of all models."""
    ranks = _shuffled(num_models, rng)
    cumulative = list(itertools.accumulate(zipf_weights(num_models, exponent)))
    step = max(1, round(num_models * shift))
    arrivals = []
    for time_s in itertools.islice(poisson_times(demand.rate_per_s, rng), demand.num_requests):
        rank = rng.choices(range(num_models), cum_weights=cumulative)[0]
        turned = (rank + int(time_s // period_s) * step) % num_models
        arrivals.append(_arrival(time_s, ranks[turned], demand, rng))
    return arrivals


def bursts(
    num_models: int, demand: Demand, rng: random.Random, mean_size: float = 8.0, exponent: float = 1.0
) -> list[Arrival]:
    """Requests come in groups for one model at one instant; the mean rate is the demand's."""
    ranks = _shuffled(num_models, rng)
    cumulative = list(itertools.accumulate(zipf_weights(num_models, exponent)))
    arrivals: list[Arrival] = []
    for time_s in poisson_times(demand.rate_per_s / mean_size, rng):
        model = rng.choices(ranks, cum_weights=cumulative)[0]
        size = min(1 + int(_exponential(mean_size, rng)), demand.num_requests - len(arrivals))
        arrivals += [_arrival(time_s, model, demand, rng) for _ in range(size)]
        if len(arrivals) >= demand.num_requests:
            break
    return arrivals


def alternating(models: Sequence[int], demand: Demand, rng: random.Random) -> list[Arrival]:
    """One model after the other in turn: the pattern that makes a cache of one slot thrash."""
    turn = itertools.cycle(models)
    times = itertools.islice(poisson_times(demand.rate_per_s, rng), demand.num_requests)
    return [_arrival(time_s, next(turn), demand, rng) for time_s in times]


def _shuffled(num_models: int, rng: random.Random) -> list[int]:
    ranks = list(range(num_models))
    rng.shuffle(ranks)
    return ranks


def _exponential(mean: float, rng: random.Random) -> float:
    """Cut off where chance has no part any more: a value beyond all bounds would only break the arithmetic of times."""
    return min(rng.expovariate(1.0 / mean), LONGEST * mean)


def _arrival(time_s: float, model: int, demand: Demand, rng: random.Random) -> Arrival:
    return Arrival(time_s, model, _exponential(demand.mean_duration_s, rng), demand.max_wait_s)
