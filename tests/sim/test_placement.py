from __future__ import annotations

from collections import Counter

import pytest
from bench.sim.placement import HashRing

MODELS = [f"model-{index}" for index in range(2000)]


def test_models_spread_over_all_workers() -> None:
    ring = HashRing([f"worker-{index}" for index in range(8)])
    counts = Counter(ring.place(model) for model in MODELS)
    assert sorted(counts) == list(range(8))
    assert max(counts.values()) < 2 * len(MODELS) / 8


def test_a_further_worker_takes_models_over_and_moves_no_others() -> None:
    before, after = (HashRing([f"worker-{index}" for index in range(size)]) for size in (8, 9))
    moved = [model for model in MODELS if before.place(model) != after.place(model)]
    assert 0 < len(moved) < 2 * len(MODELS) / 9
    assert {after.place(model) for model in moved} == {8}


def test_a_ring_of_no_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="no workers"):
        HashRing([])
