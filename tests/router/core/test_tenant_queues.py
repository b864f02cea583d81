"""A tenant's part of a queue: who waits for little is told so, whoever else floods; books that always come out even."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_router.core.tenant_queues import REQUEST_TOKENS, TenantQueues

MODEL = "chat"


def flooded(num_requests: int = 40, tenant: str = "flood", weight: float = 1.0) -> TenantQueues:
    queues = TenantQueues()
    for _ in range(num_requests):
        queues.enter(MODEL, tenant, weight, 1000)
    return queues


def test_alone_a_tenant_waits_for_the_whole_queue() -> None:
    assert flooded().share(MODEL, "flood", 1.0, 1000, 40_000) == 1.0


def test_who_has_nothing_in_the_queue_waits_for_about_one_of_the_others_requests() -> None:
    share = flooded(39).share(MODEL, "quiet", 1.0, 1000, 39_000)
    assert share == pytest.approx(2 / 40)


def test_the_weight_counts() -> None:
    heavy, light = (flooded(39).share(MODEL, "quiet", weight, 1000, 39_000) for weight in (3.0, 0.5))
    assert heavy == pytest.approx(4 / 3 / 40)
    assert light == pytest.approx(3 / 40)


def test_what_came_through_other_routers_is_somebody_elses() -> None:
    assert TenantQueues().share(MODEL, "quiet", 1.0, 1000, 39 * 1032) == pytest.approx(2 / 40)
    queues = TenantQueues()
    for _ in range(40):
        queues.enter(MODEL, "flood", 1.0, 1000)
    assert queues.share(MODEL, "flood", 1.0, 1000, 80 * 1032) == 1.0, "half of all is here: it waits for all of it"


def test_many_tenants_with_one_request_each_wait_for_each_other() -> None:
    queues = TenantQueues()
    for index in range(99):
        queues.enter(MODEL, f"tenant-{index}", 1.0, 1000)
    assert queues.share(MODEL, "last", 1.0, 1000, 99_000) == pytest.approx(1.0)


def test_nobody_in_particular_waits_for_all_and_models_are_apart() -> None:
    assert flooded().share(MODEL, "", 1.0, 1000, 40_000) == 1.0
    assert flooded().share("other", "flood", 1.0, 1000, 0) == 1.0


TENANTS = st.sampled_from(["a", "b", "c"])
MOVES = st.lists(st.tuples(TENANTS, st.integers(0, 5000), st.booleans()), max_size=40)


@given(MOVES, TENANTS, st.floats(0.001, 1000), st.integers(0, 10**6), st.integers(0, 10**9))
def test_a_share_is_a_share_and_nothing_is_left_behind(
    moves: list[tuple[str, int, bool]], tenant: str, weight: float, num_tokens: int, all_tokens: int
) -> None:
    queues = TenantQueues()
    places = []
    for name, tokens, is_left in moves:
        place = queues.enter(MODEL, name, 1.0, tokens)
        places.append(place)
        if is_left:
            queues.leave(place)
            queues.leave(place)
    share = queues.share(MODEL, tenant, weight, num_tokens, all_tokens)
    assert 0.0 < share <= 1.0
    before = queues.share(MODEL, tenant, 1.0, num_tokens, all_tokens)
    own = queues.enter(MODEL, tenant, 1.0, REQUEST_TOKENS)
    after = queues.share(MODEL, tenant, 1.0, num_tokens, all_tokens + own.num_tokens)
    assert after >= before - 1e-9, "who has more waiting waits longer"
    for place in (*places, own):
        queues.leave(place)
    assert len(queues) == 0
