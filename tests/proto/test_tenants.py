"""The tenants file: what is taken, what is refused and in which words, and that no key is ever quoted."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_proto.tenants import Quotas, Tenant, TenantKey, key_digest, matches, read_tenants, to_wire
from naru_proto.yaml_text import load_yaml

KEY = "nk-3rqkC2YdYxHtqk0iQ8b0d5cV9b1nT0aGZ7YxHtqk0iQ"
DIGEST = key_digest(KEY)
FULL = f"""
tenants:
- name: team-a
  keys:
  - {{sha256: {DIGEST.upper()}, name: ci, expires: 2030-01-31T12:00:00Z}}
  - {key_digest("other")}
  weight: 2
  topPriority: -10
  quotas: {{requestsPerMinute: 600, tokensPerMinute: 100000, maxInFlight: 32}}
  models: ["llama-*", chat]
- name: b
"""


def read(text: str) -> tuple[Tenant, ...]:
    return read_tenants(load_yaml(text.encode()))


def test_every_field_is_read_and_absent_ones_mean_no_limit() -> None:
    first, second = read(FULL)
    assert first == Tenant(
        "team-a",
        (TenantKey(DIGEST, "ci", "2030-01-31T12:00:00Z", 1896091200.0), TenantKey(key_digest("other"))),
        2.0,
        -10,
        Quotas(600, 100_000, 32),
        ("llama-*", "chat"),
    )
    assert second == Tenant("b") and second.quotas == Quotas(0, 0, 0)
    assert first.keys[1].expires_s == math.inf


def test_what_is_written_is_read_back_and_json_is_taken_too() -> None:
    tenants = read(FULL)
    assert read(yaml.safe_dump(to_wire(tenants))) == tenants
    assert read(json.dumps(to_wire(tenants))) == tenants


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"tenants: [{{name: a, keys: [{KEY}]}}]", "tenants[0].keys[0]: it must be 64 hex digits, the SHA-256"),
        (f"tenants: [{{name: a, keys: [{{sha256: {KEY}}}]}}]", "`naru tenants hash` gives it"),
        (f"tenants: [{{name: a, keys: [{{key: {KEY}}}]}}]", "tenants[0].keys[0]: unknown field 'key'"),
        (f"tenants: [{{name: a, {KEY}: 1}}]", "tenants[0]: unknown field …"),
        (f"tenants: [{{name: a, keys: [{DIGEST}]}}, {{name: b, keys: [{DIGEST}]}}]", "key stands at tenants[0]"),
        ("tenants: [{name: a}, {name: a}]", "tenants[1].name: 'a' stands twice"),
        ("tenants: [{name: 'a b'}]", "tenants[0].name: it must be 1 to 63 letters"),
        ("tenants: [{name: a, weight: 0}]", "tenants[0].weight: it must be a number in [0.001, 1000]"),
        ("tenants: [{name: a, weight: .nan}]", "tenants[0].weight"),
        ("tenants: [{name: a, topPriority: 101}]", "tenants[0].topPriority: it must be a whole number in [-100, 100]"),
        ("tenants: [{name: a, quotas: {requestsPerMinute: 0}}]", "tenants[0].quotas.requestsPerMinute"),
        ("tenants: [{name: a, quotas: {maxInFlight: true}}]", "tenants[0].quotas.maxInFlight"),
        ("tenants: [{name: a, quotas: [1]}]", "tenants[0].quotas: it must be an object with requestsPerMinute"),
        ("tenants: [{name: a, models: []}]", "tenants[0].models: it is empty, which would hide all models"),
        ("tenants: [{name: a, models: ['a b']}]", "tenants[0].models[0]: it must be a model's name"),
        (f"tenants: [{{name: a, keys: [{{sha256: {DIGEST}, expires: tomorrow}}]}}]", "a time with its zone"),
        (f"tenants: [{{name: a, keys: [{{sha256: {DIGEST}, expires: 2030-01-31}}]}}]", "a time with its zone"),
        ("tenants: {a: 1}", "tenants: it must be a list"),
        ("- name: a", "the file: it must be an object with tenants"),
        ("{}", "tenants: it is missing; write 'tenants: []' to let nobody in"),
        ("tenants: []\n---\ntenants: []", "it has 2 documents"),
        ("", "it has 0 documents"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place_and_no_key_is_quoted(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(text)
    assert message in caught.value.message
    assert KEY not in caught.value.message and KEY[3:20] not in caught.value.message


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"tenants\[0\]\.weight.*; tenants\[1\]\.topPriority"):
        read("tenants: [{name: a, weight: 0}, {name: b, topPriority: 999}]")


@pytest.mark.parametrize(
    ("patterns", "name", "expected"),
    [
        ((), "any", True),
        (("llama",), "llama", True),
        (("llama",), "llama-2", False),
        (("llama-*",), "llama-", True),
        (("*",), "x/y", True),
        (("*-chat", "q*n"), "qwen", True),
        (("a*b*c",), "a-b-b-c", True),
        (("a*b*c",), "a-c-b", False),
        (("ab*ba",), "aba", False),
        (("a.c",), "abc", False),
    ],
)
def test_patterns_take_any_characters_for_a_star_and_all_others_as_they_are(
    patterns: tuple[str, ...], name: str, expected: bool
) -> None:
    assert matches(patterns, name) == expected


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["tenants", "name", "keys", "sha256", "weight", "quotas", "models", "x"]),
                        inner, max_size=4), max_leaves=12))  # fmt: skip
def test_whatever_stands_in_the_file_it_is_taken_or_refused(value: Any) -> None:
    try:
        tenants = read_tenants([value])
    except InvalidRequest as exc:
        assert exc.message
    else:
        assert all(tenant.name for tenant in tenants)
