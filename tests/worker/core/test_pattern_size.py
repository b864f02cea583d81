"""How large a pattern is with its repetitions written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.pattern_size import pattern_size, patterns_of_lark, patterns_of_schema


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{10}", 10),
        ("a{2,10}b", 11),
        ("(ab){10}", 20),
        ("((a{100}){100}){100}", 10**6),
        ("([a-z0-9]{4}-){3}x", 16),
        (r"[\]{5}]{7}", 7),
        (r"\{3}\d{4}", 7),
        (r"\p{Greek}{3}\x{1000}", 4),
        ("a*b+c?|d{3}", 6),
        ("a{,}b{x}", 5),
        ("((", 0),
        ("))a{3}", 3),
        ("[abc", 1),
        ("(" + "a{1000}" * 2 + "){999999999}" + "{999999999}", 10**12),
    ],
)
def test_counted_repetitions_are_multiplied(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size


@given(pattern=st.text(alphabet="ab[]()\\{},0123456789|*^", max_size=60))
def test_any_text_has_a_size(pattern: str) -> None:
    assert 0 <= pattern_size(pattern) <= 10**12


@pytest.mark.parametrize(
    ("lark", "patterns"),
    [
        ("start: /a{3}/ B\nB: /b\\/c/i", ["a{3}", "b\\/c"]),
        ('start: "/no/" // nor /this/\n# or /that "\nA: /x/', ["x"]),
        ('start: "\\"/no/" %json {"pattern": "y", "const": "/no/"} /z/', ["y", "z"]),
        ('start: %json {"items": {"pattern": "a\\"/"}, "title": "' + "t" * 50_000 + '"}', ['a"/']),
        ("start: %lark {\n start: /q/ %json\n[1] }", ["q"]),
        ("start: %json {not one} /a/", ["a"]),
        ("start: /not closed\\", ["not closed"]),
        ("start: /", []),
    ],
)
def test_patterns_of_a_grammar_stand_between_slashes_and_in_its_schemas(lark: str, patterns: list[str]) -> None:
    assert list(patterns_of_lark(lark)) == patterns


@given(lark=st.text(alphabet='/"\\{}[]%json #\na1:,', max_size=60))
def test_any_text_has_patterns_or_none(lark: str) -> None:
    assert all(pattern in lark for pattern in patterns_of_lark(lark))


def test_patterns_are_found_wherever_they_stand() -> None:
    schema = {
        "properties": {"a": {"pattern": "x"}, "pattern": {"type": "string"}},
        "allOf": [{"patternProperties": {"y": {}}}],
    }
    assert sorted(patterns_of_schema(schema)) == ["x", "y"]
