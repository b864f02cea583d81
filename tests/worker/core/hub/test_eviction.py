from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.hub.eviction import Candidate, Victims, choose_victims


def candidate(
    name: str,
    *,
    idle_s: float = 10.0,
    freed_bytes: int = 100,
    reload_s: float = 0.04,
    priority: int = 100,
    is_last_copy: bool = False,
    popularity: float = 1.0,
) -> Candidate:
    return Candidate(name, idle_s, freed_bytes, reload_s, priority, is_last_copy, popularity=popularity)


def names(victims: Victims | None) -> tuple[str, ...]:
    assert victims is not None
    return victims.names


def test_among_equal_models_the_longest_idle_leaves() -> None:
    models = [candidate("a", idle_s=1.0), candidate("b", idle_s=30.0), candidate("c", idle_s=20.0)]
    assert names(choose_victims(models, 1)) == ("b",)
    assert names(choose_victims(models, 101)) == ("b", "c")


def test_equal_scores_leave_by_name_whatever_their_order() -> None:
    models = [candidate("b"), candidate("a"), candidate("c")]
    assert names(choose_victims(models, 150)) == names(choose_victims(models[::-1], 150)) == ("a", "b")


def test_a_cheap_reload_a_low_priority_and_many_bytes_make_a_model_leave_sooner() -> None:
    assert names(choose_victims([candidate("a", reload_s=1.0), candidate("b", reload_s=0.1)], 1)) == ("b",)
    assert names(choose_victims([candidate("a", priority=200), candidate("b", priority=100)], 1)) == ("b",)
    assert names(choose_victims([candidate("a", freed_bytes=50), candidate("b", freed_bytes=60)], 1)) == ("b",)


def test_a_priority_of_200_is_worth_twice_the_requests() -> None:
    plain = candidate("plain", popularity=2.0)
    assert names(choose_victims([plain, candidate("dear", popularity=1.1, priority=200)], 1)) == ("plain",)
    assert names(choose_victims([plain, candidate("dear", popularity=0.9, priority=200)], 1)) == ("dear",)


def test_a_model_that_is_asked_for_often_stays_though_another_was_used_later() -> None:
    models = [candidate("hot", idle_s=60.0, popularity=9.0), candidate("once", idle_s=1.0, popularity=1.0)]
    assert names(choose_victims(models, 1)) == ("once",)


def test_models_nobody_asked_for_within_memory_leave_by_idle_time() -> None:
    models = [candidate("a", idle_s=1e5, popularity=0.0), candidate("b", idle_s=2e5, popularity=1e-30)]
    assert names(choose_victims(models, 1)) == ("b",)


def test_last_copies_leave_after_all_others() -> None:
    models = [candidate("last", idle_s=1000.0, is_last_copy=True), candidate("fresh", idle_s=0.0)]
    assert names(choose_victims(models, 100)) == ("fresh",)
    assert names(choose_victims(models, 101)) == ("fresh", "last")


def test_a_small_first_victim_stays_when_a_later_one_covers_all() -> None:
    models = [candidate("small", idle_s=1000.0, freed_bytes=10), candidate("large", idle_s=1.0, freed_bytes=100)]
    assert names(choose_victims(models, 100)) == ("large",)


def test_nobody_leaves_in_vain() -> None:
    assert choose_victims([candidate("a"), candidate("b")], 201) is None
    assert choose_victims([candidate("a")], 0) is None
    assert choose_victims([], 1) is None


def test_a_model_that_frees_nothing_is_no_victim() -> None:
    models = [candidate("shared", idle_s=1000.0, freed_bytes=0), candidate("own")]
    assert names(choose_victims(models, 1)) == ("own",)


def test_the_reason_has_the_numbers() -> None:
    victims = choose_victims([candidate("a", idle_s=12.0, freed_bytes=104_000_000)], 90_000_000)
    assert victims is not None
    assert victims.reason == (
        "90 MB are missing; 104 MB come free by evicting 'a' (idle 12 s, popularity 1, 104 MB, reload 0.04 s)"
    )


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.uuids().map(str),
        idle_s=st.floats(0, 1e6),
        freed_bytes=st.integers(0, 100),
        reload_s=st.sampled_from([0.0, 0.04, 3.0]),
        priority=st.integers(1, 1000),
        is_last_copy=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda each: each.name,
)


@given(CANDIDATES, st.integers(1, 500))
def test_the_set_is_sufficient_minimal_and_the_same_in_any_order(
    candidates: list[Candidate], deficit_bytes: int
) -> None:
    victims = choose_victims(candidates, deficit_bytes)
    total_bytes = sum(each.freed_bytes for each in candidates)
    assert (victims is None) == (total_bytes < deficit_bytes)
    assert choose_victims(candidates[::-1], deficit_bytes) == victims
    if victims is None:
        return
    freed = {each.name: each.freed_bytes for each in candidates}
    assert victims.freed_bytes == sum(freed[name] for name in victims.names) >= deficit_bytes
    for name in victims.names:
        assert victims.freed_bytes - freed[name] < deficit_bytes, f"{name} leaves in vain"
    others = sum(each.freed_bytes for each in candidates if not each.is_last_copy)
    if others >= deficit_bytes:
        last = {each.name for each in candidates if each.is_last_copy}
        assert not last & set(victims.names), "a last copy leaves although others cover the deficit"
