from __future__ import annotations

import dataclasses

import pytest
from bench.fleet_sim.checks import better_than_naru, checks
from bench.fleet_sim.comparison import Figures
from bench.fleet_sim.placement.comparison import PlacementFigures
from bench.fleet_sim.report import as_json, check_lines, printed, seconds, tables
from bench.sim.report import PageError


def row(policy: str, ttft_mean_s: float, hit_ratio: float) -> Figures:
    return Figures("gpu", 2, "chats", 0.8, policy, ttft_mean_s, 2.0, hit_ratio, 1.25, 100, 0.8, 0.1)


ROWS = [row("oracle", 0.04, 0.80), row("Naru", 0.05, 0.78), row("llm-d", 0.045, 0.7), row("round robin", 0.2, 0.4)]
PLACEMENTS = [PlacementFigures("Naru", 1234.0, 5678.0, 0.25, 12.3, 0.6, 7, 0.67, 0.66)]
PAGE = (
    "before\n<!-- routing, printed by `make bench-routing` -->\n\nold\n<!-- end -->\nbetween\n"
    "<!-- placement, printed by `make bench-routing` -->\n<!-- end -->\nafter\n"
)


def test_the_table_says_how_far_from_the_oracle_and_who_is_sooner_than_naru() -> None:
    text = tables(ROWS)
    assert "**Chats of several turns** (8 × GPU, two routers, 80% of capacity)" in text
    assert "| Naru | 50 ms | 2.0 s | 78.0% | -2.0 | 1.25 | 80% |" in text.splitlines()
    assert "| llm-d | **45 ms** | 2.0 s | 70.0% | -10.0 | 1.25 | 80% |" in text.splitlines()
    assert "Naru is not the best here: lower mean TTFT has llm-d by 10%." in text


def test_nothing_is_said_where_naru_is_the_best_or_equal() -> None:
    assert better_than_naru([row("Naru", 0.050, 0.5), row("llm-d", 0.0495, 0.5), row("oracle", 0.01, 0.5)]) == []


def test_checks_hold_or_are_missed_by_their_limits() -> None:
    near, sooner = checks(ROWS)
    assert near.holds and near.value == pytest.approx(0.02)
    assert sooner.holds and sooner.value == pytest.approx(4.0)
    far, slower = checks([ROWS[0], row("Naru", 0.15, 0.76), ROWS[3]])
    assert not far.holds and not slower.holds
    lines = check_lines([near, slower]).splitlines()
    assert lines[0].startswith("holds  gpu  2 chats") and lines[1].startswith("MISSED gpu  2 chats")
    assert checks(ROWS[:2]) == [], "without round robin there is nothing to compare"
    assert len(checks([dataclasses.replace(each, trace="hot") for each in ROWS])) == 1


def test_a_page_gets_both_tables_between_its_marks_and_keeps_the_rest() -> None:
    fresh = printed(PAGE, ROWS, PLACEMENTS)
    assert "old" not in fresh
    assert [line for line in fresh.splitlines() if line in {"before", "between", "after"}] == [
        "before",
        "between",
        "after",
    ]
    assert "| Naru | 1,234 | 5,678 GB | 250 ms | 12.3 s | 7 | 67% |" in fresh.splitlines()
    assert printed(fresh, ROWS, PLACEMENTS) == fresh


@pytest.mark.parametrize("missing", ["<!-- routing", "<!-- placement"])
def test_a_page_without_marks_is_refused(missing: str) -> None:
    with pytest.raises(PageError, match="marks"):
        printed(PAGE.replace(missing, "<!-- else"), ROWS, PLACEMENTS)


def test_results_carry_figures_checks_and_placements() -> None:
    data = as_json(1, ROWS, PLACEMENTS)
    assert [entry["policy"] for entry in data["routing"]] == ["oracle", "Naru", "llm-d", "round robin"]
    assert [check["holds"] for check in data["checks"]] == [True, True]
    assert data["placement"][0]["loads_per_hour"] == 1234.0


def test_seconds_are_written_in_the_unit_that_reads_best() -> None:
    assert [seconds(value) for value in (0.0123, 0.9, 1.26, 123.4)] == ["12 ms", "900 ms", "1.3 s", "123 s"]
