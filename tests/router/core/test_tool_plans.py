"""Any tools that a body may have are planned for every style of model, or refused by their place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import parse_chat
from naru_router.core.json_values import MAX_DEPTH
from naru_router.core.tools.plan import plan_output, plan_prompt
from naru_router.core.tools.prompting import arguments_value, short_id
from naru_router.core.tools.styles import style_of

TEMPLATES = [
    "{{ tools }}<tool_call><think>",
    "{{ tools }}<tool_call><function=",
    "{{ tools }}<|start_header_id|>parameters",
    "{{ tools }}<|header_start|>",
    "{{ tools }}<|tool_call|><|/tool_call|>",
    "{{ tools }}<TOOLCALL>",
    "[TOOL_CALLS]",
    "[TOOL_CALLS][ARGS][THINK]",
    "<|channel|><|message|>",
    "{{ messages }}",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "enum", "$defs", "const", "string", "items"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


def asked(parameters: Any, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    return {"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools, **fields}


@settings(max_examples=150)
@given(
    parameters=st.dictionaries(st.sampled_from(["type", "properties", "required", "$defs", "x"]), JSON, max_size=4),
    choice=st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "g"}}]),
    form=st.sampled_from([None, {"type": "json_object"}]),
    parallel=st.booleans(),
    prompt=st.sampled_from(["", "<think>", "x</think>\n\n"]),
)
def test_any_tools_are_planned_or_refused(parameters: Any, choice: Any, form: Any, parallel: bool, prompt: str) -> None:
    body = asked(parameters, tool_choice=choice, response_format=form, parallel_tool_calls=parallel)
    try:
        call = parse_chat(body)
    except InvalidRequest as exc:
        assert exc.param and exc.param.startswith("tools[0].function.parameters")
        return
    for template in TEMPLATES:
        style = style_of(template)
        assert plan_prompt(style, call, template).messages
        try:
            plan = plan_output(style, call, prompt)
        except InvalidRequest as exc:
            assert exc.param == "response_format" and choice == "auto"
            continue
        is_held = choice not in ("auto", "none") or (form is not None and plan.structured is not None)
        assert (plan.structured is not None) >= (choice not in ("auto", "none"))
        assert plan.make_reader is not None or choice == "none"
        assert not plan.tail or is_held or style.name == "channels"


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (asked(nested(MAX_DEPTH)), "tools[0].function.parameters"),
        (asked({"a\ud800": 1}), "tools[0].function.parameters"),
        (asked({"a": ["\udc00"]}), "tools[0].function.parameters"),
        (
            asked({}, tools=[{"type": "function", "function": {"name": "f", "description": "\ud800"}}]),
            "tools[0].function",
        ),
        (asked({}, chat_template_kwargs={"a": nested(MAX_DEPTH)}), "chat_template_kwargs.a"),
        (asked({}, documents=[nested(MAX_DEPTH)]), "documents"),
        (asked({}, tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]), "tools"),
    ],
)
def test_what_no_template_or_grammar_could_take_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(fields)
    assert str(caught.value.param).startswith(param)


def test_arguments_are_an_object_for_the_template_or_what_the_model_wrote() -> None:
    assert arguments_value('{"a": [1, null]}') == {"a": [1, None]}
    for text in ("", "{broken", "[1]", '"a"', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": ' * 5000 + "1" + "}" * 5000):
        assert arguments_value(text) == text


def test_short_ids_are_the_same_for_the_same_and_others_for_others() -> None:
    assert short_id("Ab3dE6gH9") == "Ab3dE6gH9"
    made = [short_id(f"call_{number}") for number in range(500)]
    assert len(set(made)) == 500 and made[7] == short_id("call_7")
    assert all(len(it) == 9 and it.isalnum() and it.isascii() for it in made)
