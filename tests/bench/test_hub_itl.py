from __future__ import annotations

import pytest
from bench.hub_itl import Round, gaps_together, summary


def test_gaps_count_only_while_both_streams_run() -> None:
    gaps = gaps_together([[0.0, 1.0, 2.0, 4.0], [0.5, 1.5, 3.0, 9.0]])
    assert gaps == pytest.approx((1.0, 2.0, 1.0, 1.5))


def test_the_ratio_is_of_medians_over_rounds() -> None:
    rounds = [
        Round("idle", (0.010,) * 5, 0, 1.0),
        Round("loads", (0.015,) * 5, 3, 1.0),
        Round("requests", (0.050,) * 5, 3, 1.0),
        Round("idle", (0.020,) * 5, 0, 1.0),
        Round("loads", (0.025,) * 5, 5, 1.0),
        Round("requests", (0.060,) * 5, 2, 1.0),
        Round("idle", (0.900,) * 5, 0, 1.0),
        Round("loads", (0.030,) * 5, 4, 2.0),
        Round("requests", (0.070,) * 5, 2, 1.0),
    ]
    found = summary(rounds)
    assert found.itl_p99_ratio_during_loads == pytest.approx(0.025 / 0.020)
    assert (found.num_loads, found.num_rounds) == (12, 3)
    assert found.loads_per_s == pytest.approx(3.0)
    assert found.itl_max_loads_s == 0.030
    assert found.itl_p99_requests_s == pytest.approx(0.060)
    assert found.p99_by_round_s["idle"] == pytest.approx((0.010, 0.020, 0.900))
