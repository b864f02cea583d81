from __future__ import annotations

import pytest
from bench.hub_decisions import measure_decisions, summary


def test_a_small_hub_decides_within_its_budget_and_evicts_for_new_models() -> None:
    found = measure_decisions(num_known=300, num_resident=60, num_requests=1500, seed=1, progress=lambda text: None)
    assert found.num_known == 300
    assert 32 < found.num_resident <= 76  # more than are in flight, at most what the whole budget holds
    assert found.num_loads - found.num_evictions == found.num_resident
    assert found.num_evictions > 100
    assert found.num_calls > 3000
    assert {"RequestArrived", "RequestEnded", "Loaded", "Unloaded", "Tick"} <= set(found.by_call_p99_s)
    assert 0 < found.decision_p50_s <= found.decision_p99_s <= found.decision_max_s


def test_figures_are_over_all_calls_and_by_kind() -> None:
    found = summary({"Tick": [1000] * 99, "Loaded": [5000]}, [2000], 10, 2, 7, 5)
    assert found.num_calls == 100
    assert found.decision_p50_s == pytest.approx(1e-6)
    assert found.decision_max_s == pytest.approx(5e-6)
    assert found.by_call_p99_s == pytest.approx({"Loaded": 5e-6, "Tick": 1e-6})
    assert found.ask_p99_s == pytest.approx(2e-6)
