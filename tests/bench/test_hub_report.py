from __future__ import annotations

from typing import Any

import pytest
from bench.hub_report import TARGETS, headline, missed, notes, renewed, table

REACHED: dict[str, float | None] = {
    "budget_violations": 0,
    "failed_requests": 0,
    "first_token_p50_s": 0.15,
    "host_tier_p50_s": 0.06,
    "speedup_vs_process_per_model": 10.0,
    "itl_p99_ratio_during_loads": 2.0,
    "decision_p99_s": 0.001,
    "rss_over_budget_mb": 150.0,
    "answer_mismatches": 0,
}


def traffic(**changes: Any) -> dict[str, Any]:
    memory = {"num_children_peak": 0, "children_rss_peak_bytes": 0}
    base = {"models_answered": 5, "models_told_apart": 5, "failed_loads": 0, "failures": {}, "memory": memory}
    return {**base, **changes}


def test_a_value_at_its_bound_is_reached() -> None:
    assert {target.key for target in TARGETS} == set(REACHED)
    assert missed(REACHED) == []
    assert "MISSED" not in table(REACHED)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.key))
def test_a_value_beyond_its_bound_is_missed_and_the_table_says_so(target: Any) -> None:
    beyond = target.bound * 0.99 if target.is_at_least else target.bound * 1.01 + 1e-9
    figures = {**REACHED, target.key: beyond}
    assert missed(figures) == [target.key]
    (row,) = [line for line in table(figures).splitlines() if line.startswith(target.label)]
    assert row.endswith("MISSED")


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    figures = dict.fromkeys(REACHED)
    assert missed(figures) == []
    rows = table(figures).splitlines()[2:]
    assert len(rows) == len(TARGETS)
    assert all(row.endswith("not measured") for row in rows)


def test_the_table_shows_value_and_target_in_their_units() -> None:
    rows = table({**REACHED, "first_token_p50_s": 0.1234, "speedup_vs_process_per_model": 12.34}).splitlines()
    assert rows[4].split()[-6:] == ["123", "ms", "≤", "150", "ms", "ok"]
    assert rows[6].split()[-4:] == ["12.3×", "≥", "10×", "ok"]


def test_the_headline_takes_each_figure_from_its_part() -> None:
    found = headline(
        {
            "latency": {"first_token_p50_s": 0.1, "host_tier_p50_s": 0.05},
            "processes": {"first_token_p50_s": 1.5},
            "itl": {"itl_p99_ratio_during_loads": 1.4},
            "decisions": {"decision_p99_s": 0.0002},
            "traffic": {
                "budget_violations": 3,
                "failed_requests": 2,
                "rss_over_budget_mb": 80.0,
                "answer_mismatches": 1,
            },
        }
    )
    assert found["speedup_vs_process_per_model"] == pytest.approx(15)
    assert (found["budget_violations"], found["failed_requests"], found["answer_mismatches"]) == (3, 2, 1)
    assert (found["decision_p99_s"], found["rss_over_budget_mb"]) == (0.0002, 80.0)


def test_a_part_that_failed_leaves_its_figures_empty() -> None:
    found = headline({"latency": {"first_token_p50_s": 0.1}, "processes": None, "traffic": None})
    assert found["speedup_vs_process_per_model"] is None
    assert found["budget_violations"] is None


def test_what_weakens_the_figures_is_said() -> None:
    assert notes({"latency": {"num_samples": 32}, "traffic": traffic()}, 0.1) == []
    memory = {"num_children_peak": 2, "children_rss_peak_bytes": 300 * 10**6}
    said = notes(
        {
            "latency": {"num_samples": 6},
            "traffic": traffic(models_told_apart=3, failed_loads=4, failures={"UNAVAILABLE: x": 7}, memory=memory),
        },
        3.0,
    )
    busy, few, alike, children, loads, requests = said
    assert "3.00" in busy
    assert "6 models" in few
    assert alike.startswith("2 models")
    assert "300 MB" in children
    assert loads.startswith("4 loads")
    assert requests == "7 requests failed: UNAVAILABLE: x"


def test_parts_measured_again_replace_those_of_the_earlier_run_and_the_headline_follows() -> None:
    earlier = {
        "latency": {"first_token_p50_s": 0.040, "host_tier_p50_s": 0.03},
        "processes": {"first_token_p50_s": 0.300},
        "itl": {"itl_p99_ratio_during_loads": 2.5},
        "measured_at": "then",
        "missed": ["speedup_vs_process_per_model", "itl_p99_ratio_during_loads"],
    }
    later = {
        "plan": {"parts": ("latency",)},
        "latency": {"first_token_p50_s": 0.030, "host_tier_p50_s": 0.02},
        "itl": None,
        "measured_at": "now",
        "failures": {},
    }
    found = renewed(earlier, later)
    assert found["speedup_vs_process_per_model"] == pytest.approx(10.0)
    assert (found["host_tier_p50_s"], found["itl_p99_ratio_during_loads"]) == (0.02, 2.5)
    assert found["missed"] == ["itl_p99_ratio_during_loads"]
    assert (found["measured_at"], found["measured_again_at"]) == ("then", {"latency": "now"})
