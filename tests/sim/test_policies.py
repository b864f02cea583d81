from __future__ import annotations

import pytest
from bench.sim.policies import POLICIES, choose_lfu, choose_lru, choose_nobody
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from naru_worker.core.hub.eviction import Candidate, VictimChooser


def candidate(name: str, idle_s: float, freed_bytes: int = 10, uses: int = 0) -> Candidate:
    return Candidate(name, idle_s, freed_bytes, reload_s=1.0, priority=100, is_last_copy=False, uses=uses)


CANDIDATES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50), st.integers(0, 5)), max_size=8)


def test_lru_takes_the_longest_unused_first_whatever_its_size() -> None:
    models = [candidate("new", 1.0, 100), candidate("old", 9.0, 10), candidate("older", 10.0, 10)]
    victims = choose_lru(models, 15)
    assert victims is not None
    assert (victims.names, victims.freed_bytes) == (("older", "old"), 20)


def test_lfu_takes_the_least_used_first_and_the_longest_unused_among_them() -> None:
    models = [candidate("often", 50.0, uses=9), candidate("once", 1.0, uses=1), candidate("once, earlier", 5.0, uses=1)]
    victims = choose_lfu(models, 15)
    assert victims is not None
    assert victims.names == ("once, earlier", "once")


def test_idle_only_lets_nobody_go_for_another_model() -> None:
    assert choose_nobody([candidate("idle", 1e6)], 1) is None


@pytest.mark.parametrize("choose", [policy.choose for policy in POLICIES if policy.name != "idle only"])
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=CANDIDATES, deficit_bytes=st.integers(1, 200))
def test_victims_cover_the_deficit_and_are_refused_only_where_all_together_do_not(
    choose: VictimChooser, values: list[tuple[int, int, int]], deficit_bytes: int
) -> None:
    models = [candidate(f"m{index}", *numbers) for index, numbers in enumerate(values)]
    victims = choose(models, deficit_bytes)
    if victims is None:
        assert sum(model.freed_bytes for model in models) < deficit_bytes
        return
    freed = {model.name: model.freed_bytes for model in models}
    assert victims.freed_bytes == sum(freed[name] for name in victims.names) >= deficit_bytes
    assert len(set(victims.names)) == len(victims.names)
