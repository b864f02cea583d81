"""The short way for the only worker there is says what the long one says; reasons are words only when read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from naru_router.core.routing.cost import alone, compare
from naru_router.core.routing.model import RouteRequest, WorkerView
from naru_router.core.routing.reasons import Reasons
from naru_router.core.routing.route import route

numbers = st.sampled_from([0.0, -1.0, float("inf"), float("nan")]) | st.floats(0.001, 1e5)
counts = st.integers(-3, 300)
views = st.builds(
    WorkerView,
    worker_id=st.just("w"),
    num_in_flight=st.integers(0, 300),
    num_in_flight_all=st.integers(0, 300),
    waiting_tokens=st.integers(-10, 100_000),
    prefill_tokens_per_s=numbers,
    decode_step_s=numbers,
    num_cached_keys=counts,
)


@st.composite
def requests(draw: st.DrawFn) -> RouteRequest:
    key_tokens = tuple(sorted(draw(st.lists(st.integers(1, 5000), max_size=8))))
    held = draw(st.none() | st.just({}) | st.builds(lambda n: {"w": n}, st.integers(0, 20)))
    return RouteRequest(b"k", draw(st.integers(-1, 6000)), key_tokens, cached_keys=held)


@given(views, requests())
def test_one_worker_costs_what_it_would_cost_among_others(view: WorkerView, request: RouteRequest) -> None:
    assert alone(view, request) == compare([view], request).at(0)


@given(views, requests())
def test_its_decision_has_the_same_figures(view: WorkerView, request: RouteRequest) -> None:
    decision, costs = route([view], request), compare([view], request)
    assert (decision.worker_id, decision.num_skipped) == ("w", 0)
    assert decision.scores_s == {"w": costs.costs_s[0]} and decision.expected_s == costs.at(0).expected_s
    assert f"{costs.cached_tokens[0]} of {costs.num_tokens} tokens cached" in decision.reasons
    assert view.num_in_flight < decision.capacity


def test_reasons_are_put_into_words_once_and_only_when_read() -> None:
    said: list[int] = []

    def say(number: int) -> list[str]:
        said.append(number)
        return [f"first {number}", "second"]

    reasons = Reasons(say, 7)
    assert said == []
    assert list(reasons) == ["first 7", "second"] and reasons[-1] == "second" and len(reasons) == 2
    assert reasons == ("first 7", "second") == reasons and reasons != ("other",) and reasons[:1] == ("first 7",)
    assert {reasons: 1}[Reasons(say, 7)] == 1 and "second" in reasons
    assert said == [7, 7]
