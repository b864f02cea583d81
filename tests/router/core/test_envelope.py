"""What comes with a call beside its content: read strictly, refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_router.core.caller import ANYONE, Caller
from naru_router.core.envelope import MAX_TIMEOUT_S, PRIORITIES, read_envelope


def read(headers: dict[str, str] | None = None, caller: Caller = ANYONE, **body: Any) -> Any:
    return read_envelope((headers or {}).get, caller, "id", **body)


def test_nothing_given_is_normal_and_without_limit() -> None:
    it = read()
    assert (it.priority, it.timeout_s, it.session, it.is_explained, it.request_id) == (0, 0.0, "", False, "id")


def test_headers_win_over_the_body() -> None:
    it = read({"x-naru-priority": "7", "x-session-id": "s"}, priority=3, cache_key="k")
    assert (it.priority, it.session) == (7, "s")
    it = read(priority=3, cache_key="k")
    assert (it.priority, it.session) == (3, "k")


@pytest.mark.parametrize(("asked", "got"), [(-50, -10), (-10, -10), (0, 0), (100, 100)])
def test_nobody_is_sooner_than_the_tenant_may_be(asked: int, got: int) -> None:
    assert read(caller=Caller("t", top_priority=-10), priority=asked).priority == got


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"x-naru-priority": "soon"}, {}),
        ({"x-naru-priority": "1.5"}, {}),
        ({"x-naru-priority": str(PRIORITIES[1] + 1)}, {}),
        ({}, {"priority": True}),
        ({}, {"priority": "1"}),
        ({}, {"priority": PRIORITIES[0] - 1}),
        ({"x-naru-timeout": "0"}, {}),
        ({"x-naru-timeout": "-1"}, {}),
        ({"x-naru-timeout": "nan"}, {}),
        ({"x-naru-timeout": "inf"}, {}),
        ({"x-naru-timeout": "1e3"}, {}),
        ({"x-naru-timeout": str(MAX_TIMEOUT_S + 1)}, {}),
        ({"x-session-id": "s" * 257}, {}),
        ({}, {"cache_key": 5}),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(headers: dict[str, str], body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read(headers, **body)
    named = next(iter(headers), None) or {"priority": "priority", "cache_key": "prompt_cache_key"}[next(iter(body))]
    assert refusal.value.param == named
    assert named in refusal.value.message


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=300))
def test_any_text_is_read_or_refused(priority: str, timeout: str, session: str) -> None:
    headers = {"x-naru-priority": priority, "x-naru-timeout": timeout, "x-session-id": session}
    try:
        it = read(headers)
    except InvalidRequest as refusal:
        assert refusal.param in headers
    else:
        assert PRIORITIES[0] <= it.priority <= PRIORITIES[1] and 0 < it.timeout_s <= MAX_TIMEOUT_S


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("true", True), ("0", False), ("False", False), ("", False)])
def test_an_explanation_comes_on_request(text: str, meant: bool) -> None:
    assert read({"x-naru-explain": text}).is_explained is meant
