from __future__ import annotations

import pytest
from bench.worker import kv_waste


def test_waste_counts_each_sample_by_the_blocks_in_use() -> None:
    assert kv_waste([(100, 0.02), (300, 0.04), (0, 0.9)]) == pytest.approx(0.035)


def test_waste_of_an_idle_worker_is_unknown() -> None:
    assert kv_waste([(0, 0.0)]) is None
    assert kv_waste([]) is None
