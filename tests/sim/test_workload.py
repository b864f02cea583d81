from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from bench.sim.workload import Demand, alternating, bursts, shifting, zipf, zipf_weights

DEMAND = Demand(num_requests=4000, rate_per_s=5.0, mean_duration_s=2.0)


def test_zipf_requests_come_at_the_rate_and_with_the_popularity_asked_for() -> None:
    arrivals = zipf(50, DEMAND, random.Random(3))
    assert len(arrivals) == 4000
    assert arrivals[-1].time_s == pytest.approx(4000 / 5.0, rel=0.1)
    assert sum(arrival.duration_s for arrival in arrivals) / 4000 == pytest.approx(2.0, rel=0.1)
    counts = [count for _, count in Counter(arrival.model for arrival in arrivals).most_common()]
    weights = zipf_weights(50, 1.0)
    assert counts[0] / 4000 == pytest.approx(weights[0] / sum(weights), rel=0.1)
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.25)


@pytest.mark.parametrize("make", [zipf, shifting, bursts])
def test_the_same_seed_gives_the_same_requests_in_the_order_of_time(make: object) -> None:
    assert callable(make)
    first, second, other = (make(20, DEMAND, random.Random(seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert len(first) == DEMAND.num_requests
    assert all(before.time_s <= after.time_s for before, after in itertools.pairwise(first))


def test_popularity_shifts_from_period_to_period() -> None:
    arrivals = shifting(50, DEMAND, random.Random(3), period_s=200.0, shift=0.1)
    favourites = [
        Counter(arrival.model for arrival in arrivals if arrival.time_s // 200.0 == period).most_common(1)[0][0]
        for period in range(3)
    ]
    assert len(set(favourites)) == 3


def test_a_burst_is_one_model_at_one_instant() -> None:
    arrivals = bursts(20, DEMAND, random.Random(3), mean_size=8.0)
    groups = [[arrival.model for arrival in group] for _, group in itertools.groupby(arrivals, lambda a: a.time_s)]
    assert all(len(set(models)) == 1 for models in groups)
    assert len(arrivals) / len(groups) == pytest.approx(8.0, rel=0.2)


def test_alternating_models_take_turns() -> None:
    arrivals = alternating((4, 7), Demand(num_requests=6, rate_per_s=1.0), random.Random(0))
    assert [arrival.model for arrival in arrivals] == [4, 7, 4, 7, 4, 7]
