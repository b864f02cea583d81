"""The last requests' courses: bounded, one tenant's own, without content; and the sizes that estimates go by."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from naru_router.core import token_sizes
from naru_router.core.routing.model import Decision
from naru_router.core.token_sizes import DEFAULT_BYTES_PER_TOKEN, TokenSizes
from naru_router.core.traces import MAX_ATTEMPTS_SHOWN, RequestTrace, Traces, trace_json


def trace(request_id: str, tenant: str = "") -> RequestTrace:
    return RequestTrace(request_id, tenant, "m", num_tokens=10, num_keys=2, priority=0, began_s=100.0)


def test_the_oldest_goes_and_the_newest_of_an_id_stays() -> None:
    traces = Traces(2)
    first, again = trace("a"), trace("a")
    for each in (first, trace("b"), again, trace("c")):
        traces.keep(each)
    assert len(traces) == 2
    assert traces.get("a", "") is again
    assert traces.get("b", "") is None


def test_a_tenant_sees_its_own_alone() -> None:
    traces = Traces(2)
    traces.keep(trace("a", "one"))
    assert traces.get("a", "one") is not None
    assert traces.get("a", "other") is None
    assert traces.get("a", "") is None


def test_without_an_id_or_room_nothing_is_kept() -> None:
    none, some = Traces(0), Traces(2)
    none.keep(trace("a"))
    some.keep(trace(""))
    assert len(none) == len(some) == 0


def test_times_count_from_the_request_and_attempts_are_bounded() -> None:
    it = trace("a")
    for number in range(MAX_ATTEMPTS_SHOWN + 3):
        it.add(Decision(f"w{number}", 1, 0, ("why",)), is_held=False, now_s=101.0)
    it.end("served", 103.5)
    shown = orjson.loads(orjson.dumps(trace_json(it)))
    assert [attempt["worker"] for attempt in shown["attempts"]] == [f"w{n}" for n in range(3, MAX_ATTEMPTS_SHOWN + 3)]
    assert shown["attempts"][0]["sent_at_s"] == 1.0
    assert (shown["outcome"], shown["total_s"]) == ("served", 3.5)


@given(st.lists(st.tuples(st.integers(-5, 10**9), st.integers(-5, 10**6)), max_size=30))
def test_sizes_stay_within_reason_whatever_is_measured(samples: list[tuple[int, int]]) -> None:
    sizes = TokenSizes()
    for num_bytes, num_tokens in samples:
        sizes.observe("m", num_bytes, num_tokens)
    assert 0.25 <= sizes.bytes_per_token("m") <= 64.0


def test_sizes_go_to_what_is_measured() -> None:
    sizes = TokenSizes()
    assert sizes.bytes_per_token("m") == DEFAULT_BYTES_PER_TOKEN
    sizes.observe("m", 300, 100)
    assert sizes.bytes_per_token("m") == 3.0
    for _ in range(100):
        sizes.observe("m", 500, 100)
    assert abs(sizes.bytes_per_token("m") - 5.0) < 0.01
    assert sizes.bytes_per_token("other") == DEFAULT_BYTES_PER_TOKEN


def test_models_that_nobody_asks_for_are_forgotten() -> None:
    sizes = TokenSizes()
    for number in range(token_sizes.MAX_MODELS + 1):
        sizes.observe(f"m{number}", 300, 100)
    assert sizes.bytes_per_token("m0") == DEFAULT_BYTES_PER_TOKEN
    assert sizes.bytes_per_token("m1") == 3.0
