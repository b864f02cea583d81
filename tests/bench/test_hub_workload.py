from __future__ import annotations

import collections
import functools

import pytest
from bench.hub_workload import best_hit_ratio, lru_hit_ratio, zipf_sequence
from hypothesis import given
from hypothesis import strategies as st


def test_a_seed_fixes_the_sequence_and_another_one_changes_it() -> None:
    assert zipf_sequence(50, 200, 1.0, 7) == zipf_sequence(50, 200, 1.0, 7)
    assert zipf_sequence(50, 200, 1.0, 7) != zipf_sequence(50, 200, 1.0, 8)


def test_shares_fall_with_the_rank_as_zipf_says() -> None:
    num_requests = 100_000
    counts = collections.Counter(zipf_sequence(20, num_requests, 1.0, 1))
    total = sum(1 / rank for rank in range(1, 21))
    # about 0.3 % of a share of 28 %: five standard deviations are far below the bounds
    for rank, (_, count) in enumerate(counts.most_common(5), 1):
        assert count / num_requests == pytest.approx(1 / rank / total, rel=0.1)


def test_with_exponent_zero_all_models_are_equal() -> None:
    counts = collections.Counter(zipf_sequence(4, 40_000, 0.0, 1))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 1.1 * min(counts.values())


def test_lru_keeps_what_was_used_last() -> None:
    assert lru_hit_ratio([1, 2, 1, 3, 1, 2], 2) == pytest.approx(2 / 6)
    assert lru_hit_ratio([1, 2, 3] * 4, 2) == 0.0
    assert lru_hit_ratio([1, 2, 3] * 4, 3) == pytest.approx(9 / 12)


def _most_hits(sequence: list[int], capacity: int) -> int:
    """By trying everything that may leave."""

    @functools.cache
    def hits(at: int, cached: frozenset[int]) -> int:
        if at == len(sequence):
            return 0
        model = sequence[at]
        if model in cached:
            return 1 + hits(at + 1, cached)
        grown = cached | {model}
        if len(grown) <= capacity:
            return hits(at + 1, grown)
        return max(hits(at + 1, grown - {victim}) for victim in grown)

    return hits(0, frozenset())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
def test_no_policy_beats_the_one_that_knows_the_future(sequence: list[int], capacity: int) -> None:
    best = best_hit_ratio(sequence, capacity)
    assert best == pytest.approx(_most_hits(sequence, capacity) / len(sequence))
    assert lru_hit_ratio(sequence, capacity) <= best + 1e-9
