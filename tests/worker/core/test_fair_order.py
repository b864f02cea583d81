"""Turns of tenants: shares by weight, bursts, idle tenants, order within a tenant, what is taken back, memory."""

from __future__ import annotations

import heapq
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_worker.core.fair_order import FairOrder, Turn, Work

MODEL = "m"


class Server:
    """Serves one request at a time, always the one with the lowest number."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.waiting: list[tuple[int, Turn, int]] = []
        self.served: list[str] = []
        self.tokens: Counter[str] = Counter()

    def enter(self, tenant: str, weight: float = 1.0, tokens: int = 10, real_tokens: int | None = None) -> Turn:
        turn = self.order.enter(MODEL, 0, tenant, weight, Work(tokens, 0))
        heapq.heappush(self.waiting, (turn.number, turn, tokens if real_tokens is None else real_tokens))
        return turn

    def serve(self) -> str:
        _, turn, tokens = heapq.heappop(self.waiting)
        self.order.begin(turn)
        self.served.append(turn.tenant)
        self.tokens[turn.tenant] += tokens
        self.order.end(turn, computed_tokens=tokens)
        return turn.tenant


@given(
    st.floats(0.1, 10.0),
    st.floats(0.1, 10.0),
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
    st.lists(st.integers(1, 100), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_tenants_with_a_backlog_get_work_by_their_weights(
    weight_a: float, weight_b: float, sizes_a: list[int], sizes_b: list[int]
) -> None:
    server = Server()
    jobs = {"a": (weight_a, deque(sizes_a)), "b": (weight_b, deque(sizes_b))}
    for name, (weight, sizes) in jobs.items():
        for _ in range(3):
            server.enter(name, weight, sizes[0])
            sizes.rotate()
    for _ in range(300):
        name = server.serve()
        weight, sizes = jobs[name]
        server.enter(name, weight, sizes[0])
        sizes.rotate()
        # The bound of the source, for any interval: the largest request of each, over its weight.
        bound = max(sizes_a) / weight_a + max(sizes_b) / weight_b + 1e-2
        assert abs(server.tokens["a"] / weight_a - server.tokens["b"] / weight_b) <= bound


def test_weights_of_one_to_three_give_work_of_one_to_three() -> None:
    server = Server()
    for _ in range(400):
        server.enter("one", 1.0)
        server.enter("three", 3.0)
    for _ in range(400):
        server.serve()
    assert server.tokens == {"one": 1000, "three": 3000}


def test_shares_hold_where_estimates_are_wrong() -> None:
    server = Server()
    for _ in range(10):
        server.enter("modest", tokens=10)
        server.enter("liar", tokens=10, real_tokens=50)
    for _ in range(3000):
        name = server.serve()
        server.enter(name, tokens=10, real_tokens=50 if name == "liar" else None)
    assert server.tokens["liar"] == pytest.approx(server.tokens["modest"], rel=0.05)


def test_a_burst_delays_another_tenants_request_by_one_service() -> None:
    server = Server()
    for _ in range(1000):
        server.enter("burst")
    for _ in range(500):
        server.serve()
    server.enter("single", tokens=100_000)
    assert "single" in (server.serve(), server.serve())


def test_an_idle_tenant_saves_up_no_credit() -> None:
    server = Server()
    for name in ("idle", "busy"):
        server.enter(name)
    for _ in range(200):
        server.enter("busy")
    for _ in range(150):
        server.serve()
    for _ in range(50):
        server.enter("idle")
    before = Counter(server.served)
    for _ in range(40):
        server.serve()
    after = Counter(server.served) - before
    assert abs(after["idle"] - after["busy"]) <= 2


def test_what_was_estimated_too_high_is_no_credit_for_an_idle_tenant() -> None:
    server = Server()
    for _ in range(100):
        server.enter("busy")
    server.enter("idle", tokens=1000, real_tokens=1)
    while "idle" not in server.served:
        server.serve()
    for _ in range(60):
        server.serve()
    for _ in range(60):
        server.enter("busy")
        server.enter("idle", tokens=100)
    start = len(server.served)
    for _ in range(44):
        server.serve()
    assert Counter(server.served[start:])["idle"] in range(4, 7)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50), st.booleans()), max_size=60))
def test_requests_of_one_tenant_keep_their_order_and_no_two_numbers_are_equal(
    steps: list[tuple[str, int, bool]],
) -> None:
    server = Server()
    numbers: dict[str, list[int]] = {"a": [], "b": []}
    for tenant, tokens, is_served in steps:
        numbers[tenant].append(server.enter(tenant, tokens=tokens, real_tokens=1).number)
        if is_served:
            server.serve()
    for each in numbers.values():
        assert each == sorted(each)
    everything = numbers["a"] + numbers["b"]
    assert len(set(everything)) == len(everything)


@given(st.lists(st.sampled_from("abc"), max_size=40), st.data())
def test_what_has_begun_is_never_behind_what_comes_later(names: list[str], data: st.DataObject) -> None:
    server = Server()
    begun: list[Turn] = []
    for name in names:
        turn = server.enter(name)
        assert all(turn.number > other.number for other in begun)
        for _ in range(data.draw(st.integers(0, 2))):
            if server.waiting:
                _, first, _ = heapq.heappop(server.waiting)
                server.order.begin(first)
                begun.append(first)


def test_requests_that_are_taken_back_are_not_charged() -> None:
    server = Server()
    for _ in range(3):
        server.enter("other")
    server.serve()
    taken = [server.order.enter(MODEL, 0, "a", 1.0, Work(1000)) for _ in range(100)]
    for turn in taken:
        server.order.end(turn)
        server.order.end(turn)
    server.enter("a")
    assert server.serve() == "a"


def test_a_debt_outlives_requests_that_are_taken_back() -> None:
    server = Server()
    for _ in range(1000):
        server.enter("other")
    server.enter("a", real_tokens=1000)
    while "a" not in server.served:
        server.serve()
    for _ in range(5):
        server.order.end(server.order.enter(MODEL, 0, "a", 1.0, Work(10, 0)))
    server.enter("a")
    server.enter("a")
    start = len(server.served)
    for _ in range(90):
        server.serve()
    assert Counter(server.served[start:])["a"] == 1, "the second one comes after a hundred of the other's"


def test_a_request_that_starts_out_of_its_turn_puts_nobody_behind_those_it_passed() -> None:
    order = FairOrder()
    turns = [order.enter(MODEL, 0, "burst", 1.0, Work(10, 0)) for _ in range(100)]
    order.begin(turns[0])
    order.begin(turns[80])
    single = order.enter(MODEL, 0, "single", 1.0, Work(10, 0))
    assert turns[0].number < single.number < turns[2].number


def test_priorities_and_models_have_queues_of_their_own() -> None:
    order = FairOrder()
    for _ in range(50):
        order.begin(order.enter("other", 0, "a", 1.0, Work(10, 0)))
        order.begin(order.enter(MODEL, -1, "a", 1.0, Work(10, 0)))
    backlog = [order.enter(MODEL, 0, "a", 1.0, Work(10, 0)) for _ in range(3)]
    late = order.enter(MODEL, 0, "b", 1.0, Work(10, 0))
    assert backlog[0].number < late.number < backlog[1].number


def test_an_answers_estimate_follows_its_tenants_answers_and_its_own_limit() -> None:
    order = FairOrder()
    keep = order.enter(MODEL, 0, "a", 1.0, Work(0, 0))
    first = order.enter(MODEL, 0, "a", 1.0, Work(10))
    assert first.tokens == 10 + 256
    assert order.enter(MODEL, 0, "a", 1.0, Work(10, 20, 3)).tokens == 70
    for _ in range(100):
        turn = order.enter(MODEL, 0, "a", 1.0, Work(10))
        order.begin(turn)
        order.end(turn, 15, 5)
    assert order.enter(MODEL, 0, "a", 1.0, Work(10)).tokens == pytest.approx(15, abs=0.1)
    order.end(keep)


@pytest.mark.parametrize("work", [Work(0, 0), Work(10**12, 10**12, 10**6)])
@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_extreme_sizes_and_weights_keep_the_order_usable(work: Work, weight: float) -> None:
    order = FairOrder()
    first = order.enter(MODEL, 0, "huge", weight, work)
    second = order.enter(MODEL, 0, "huge", weight, work)
    other = order.enter(MODEL, 0, "other", 1.0, Work(1, 1))
    assert first.number < other.number < second.number or first.number < second.number < other.number
    order.begin(first)
    for turn in (first, second, other):
        order.end(turn)
    assert len(order) == 0


def test_memory_is_bounded_however_many_tenants_come() -> None:
    order = FairOrder()
    keep = order.enter(MODEL, 0, "long", 1.0, Work(10))
    for index in range(5000):
        turn = order.enter(MODEL, 0, f"t{index}", 1.0, Work(10))
        order.begin(turn)
        order.end(turn, 10, 5)
        assert order.num_tenants(MODEL, 0) <= 1024 + 3
    order.end(keep)
    assert len(order) == 0 and order.num_tenants(MODEL, 0) == 0
