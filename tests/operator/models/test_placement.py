"""Where copies go: they stay, they fit, and no worker has two of a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_operator.core.placement import Candidate, Demand, place


@pytest.mark.parametrize(
    ("candidates", "demands", "placed"),
    [
        (
            [Candidate("a", "p", free_bytes=50), Candidate("b", "p", free_bytes=20), Candidate("c", "p", free_bytes=9)],
            [Demand("m", ("p",), 1, 10)],
            {"m": ("b",)},
        ),
        (
            [Candidate("a", "p", free_bytes=50), Candidate("b", "p", free_bytes=20)],
            [Demand("small", ("p",), 1, 10), Demand("large", ("p",), 1, 20)],
            {"small": ("a",), "large": ("b",)},
        ),
        (
            [Candidate("a", "p", free_bytes=5), Candidate("b", "p", free_bytes=8)],
            [Demand("m", ("p",), 1, 10)],
            {"m": ("b",)},
        ),
        (
            [Candidate("a", "p", {"x": ()}, free_bytes=5), Candidate("b", "p", free_bytes=8), Candidate("c", "p")],
            [Demand("x", ("p",), 1, 3), Demand("m", ("p",), 1)],
            {"x": ("a",), "m": ("b",)},
        ),
        (
            [Candidate("a", "p", {"m": (1,)}), Candidate("b", "p", {"m": (0,)}), Candidate("c", "q", {"m": (0,)})],
            [Demand("m", ("p",), 1)],
            {"m": ("b",)},
        ),
        ([Candidate("b", "q"), Candidate("a", "p")], [Demand("m", ("p", "q"), None)], {"m": ("a", "b")}),
        ([Candidate("a", "q")], [Demand("m", ("p",), 2)], {"m": ()}),
    ],
    ids=["the least room", "the largest first", "the most room", "the fewest", "the lowest rank", "known", "nowhere"],
)  # fmt: skip
def test_where_copies_go(
    candidates: list[Candidate], demands: list[Demand], placed: dict[str, tuple[str, ...]]
) -> None:
    assert place(demands, candidates) == placed
    assert place(demands, candidates[::-1]) == placed


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("pq"), st.sets(st.sampled_from("abcd")), st.integers(0, 40)), max_size=6),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), min_size=4, max_size=4),
)
def test_copies_stay_and_have_a_worker_each(
    workers: list[tuple[str, set[str], int]], wants: list[tuple[int, int]]
) -> None:
    candidates = [
        Candidate(f"w{index}", pool, dict.fromkeys(models, ()), free_bytes)
        for index, (pool, models, free_bytes) in enumerate(workers)
    ]
    demands = [Demand(name, ("p",), copies, size) for name, (copies, size) in zip("abcd", wants, strict=True)]
    placed = place(demands, candidates)
    eligible = {each.worker_id: each for each in candidates if each.pool == "p"}
    for demand in demands:
        assert demand.num_copies is not None
        chosen = placed[demand.model]
        assert len(chosen) == len(set(chosen)) == min(demand.num_copies, len(eligible))
        holders = {worker_id for worker_id, each in eligible.items() if demand.model in each.holding}
        assert set(chosen) <= holders or holders <= set(chosen)
    after = [
        Candidate(each.worker_id, each.pool, {n: () for n in placed if each.worker_id in placed[n]}, each.free_bytes)
        for each in candidates
    ]
    assert place(demands, after) == placed
