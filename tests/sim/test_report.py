from __future__ import annotations

import pytest
from bench.sim.report import PageError, printed, table
from bench.sim.traces import Figures

FIGURES = [
    Figures("Naru", "equal", 0.5, (0.5,), 1.234, 20.0, 1234.0, 30, 20, 90, 5, 5),
    Figures("LRU", "mixed", 0.25, (0.2, 0.3), 2.0, 60.0, 10.0, 3, 2, 90, 0, 10),
]


def test_the_table_has_a_section_for_each_trace_that_was_run_and_a_row_for_each_policy() -> None:
    text = table(FIGURES)
    assert "**Equal sizes**" in text and "**Mixed sizes and reload costs**" in text
    assert "shifts" not in text
    assert "| Naru | 50.0% | 1.23 s | 20.0 s | 1,234 GB | 30 | 20 | 5 | 5 |" in text.splitlines()


def test_a_page_gets_the_table_between_its_marks_and_keeps_the_rest() -> None:
    page = "before\n<!-- policies, printed by `make bench-sim` -->\n\nold\n<!-- end -->\nafter\n"
    fresh = printed(page, FIGURES)
    assert fresh.startswith("before\n") and fresh.endswith("<!-- end -->\nafter\n")
    assert "old" not in fresh and "| LRU |" in fresh
    assert printed(fresh, FIGURES) == fresh


def test_an_empty_place_is_a_place() -> None:
    page = "<!-- policies, printed by `make bench-sim` -->\n<!-- end -->\n"
    assert "| Naru |" in printed(page, FIGURES)


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(PageError, match="marks"):
        printed("no marks", FIGURES)
