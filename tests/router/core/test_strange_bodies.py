"""Any JSON in any place of a body of the Responses or the Messages API is taken, or refused by name: never a crash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_router.core.anthropic.request import parse_messages
from naru_router.core.responses.reply import ResponseWriter
from naru_router.core.responses.request import parse_response

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5000,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "r", "is_error": False}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "temperature": 1,
    "stream": True,
}
RESPONSE: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "r"}]},
    ],
    "tools": [{"type": "function", "name": "look", "description": "d", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "top_logprobs": 2,
    "previous_response_id": "resp_x",
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "\ud800", "a\x00b", "look", "text", "function", "x" * 200]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "\udfff"]), inner),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [place for key, child in children for place in places(child, (*path, key))]


def parse_and_tell(body: dict[str, Any]) -> None:
    """What is taken can be told again."""
    call = parse_response(body, "id")
    writer = ResponseWriter(call, answer_id="id", created_s=1, make_reader=None)
    assert b"response.failed" not in writer.fail(InvalidRequest("x"))
    orjson.dumps([call.told, call.items])
    call.chat()


@pytest.mark.parametrize(
    ("base", "parse"), [(MESSAGE, parse_messages), (RESPONSE, parse_and_tell)], ids=["messages", "responses"]
)
@given(data=st.data())
def test_any_json_in_any_place_is_taken_or_refused_by_name(
    base: dict[str, Any], parse: Callable[[dict[str, Any]], object], data: st.DataObject
) -> None:
    parse(base)
    body = copy.deepcopy(base)
    *way, last = data.draw(st.sampled_from(places(base)))
    at: Any = body
    for key in way:
        at = at[key]
    at[last] = data.draw(JSON)
    try:
        parse(body)
    except InvalidRequest as refused:
        assert refused.param, refused
