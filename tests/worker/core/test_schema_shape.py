"""Where a schema is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_worker.core.schema_shape import fault_of_schema, make_dates_exact


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({}, ""),
        (True, ""),
        ({"type": ["string", "null"], "items": [{}, True], "const": {"properties": 1}, "pattern": 3}, ""),
        ({"properties": {"properties": {"type": "null"}, "type": {}}, "$defs": {"a": False}}, ""),
        ("four", 'the whole should be a schema (an object), and is "four"'),
        ({"properties": {"wheels": 4}}, "properties.wheels should be a schema (an object), and is 4"),
        ({"allOf": [{}, {"not": []}]}, "allOf[1].not should be a schema (an object), and is []"),
        ({"items": {"$defs": ["a"]}}, 'items.$defs should be an object of schemas, and is ["a"]'),
        ({"items": [{}, 5]}, "items[1] should be a schema (an object), and is 5"),
        ({"prefixItems": {}}, "prefixItems should be a list of schemas, and is {}"),
        ({"type": [["string"]]}, "type should be of array, boolean, integer, null, number, object, string, and is "),
        ({"not": {"enum": "x"}, "if": "x" * 99}, 'if should be a schema (an object), and is "' + "x" * 59 + "..."),
    ],
)
def test_the_first_part_that_is_no_schema_is_named(schema: Any, fault: str) -> None:
    found = fault_of_schema(schema)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


_KEYS = st.sampled_from(["properties", "items", "allOf", "not", "type", "$defs", "const", "a"])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=20,
)


@given(schema=_ANY)
def test_any_json_has_a_fault_or_none(schema: Any) -> None:
    fault = fault_of_schema(schema)
    assert len(fault) < 300
    assert fault or isinstance(schema, bool | dict)


def test_dates_are_made_exact_wherever_a_schema_stands_and_nowhere_else() -> None:
    date = {"type": "string", "format": "date"}
    schema = {
        "const": dict(date),
        "items": [{"anyOf": [{**date, "allOf": [{}]}]}],
        "properties": {"format": dict(date)},
    }
    assert make_dates_exact(schema)
    assert schema["const"] == date
    inner: Any = schema["items"]
    assert [list(each) for each in inner[0]["anyOf"][0]["allOf"]] == [[], ["pattern"]]
    named: Any = schema["properties"]
    assert len(named["format"]["allOf"]) == 1
    assert not make_dates_exact({"properties": {"date": {"format": "time"}}})
