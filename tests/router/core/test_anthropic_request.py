"""Bodies of the Messages API as chats: turns, tools, thinking, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from naru_proto.errors import InvalidRequest
from naru_router.core.anthropic.request import Thinking, parse_count, parse_messages
from naru_router.core.chat_request import ChatMessage, Tool, ToolCall, ToolChoice

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    given = list(messages) or [{"role": "user", "content": "hi"}]
    return {"model": "m", "max_tokens": 4096, "messages": given, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_calls_and_results_of_tools_become_messages_of_their_own() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    sealed = {"type": "redacted_thinking", "data": "x"}
    call = parse_messages(
        body(user(text("q")), assistant(thought, sealed, text("Look."), USE), user(RESULT, text("so?")))
    )
    assert call.chat.messages == (
        ChatMessage("user", "q"),
        ChatMessage("assistant", "Look.", tool_calls=(ToolCall("t1", "look", '{"a":1}'),), reasoning="hm"),
        ChatMessage("tool", "found", name="look", tool_call_id="t1"),
        ChatMessage("user", "so?"),
    )


def test_a_result_may_be_a_text_absent_or_an_error() -> None:
    other = {**USE, "id": "t2"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "lost", "is_error": True},
    ]
    messages = parse_messages(body(user(text("q")), assistant(USE, other), user(*results))).chat.messages
    assert [message.content for message in messages[2:]] == ["", "Error:\nlost"]


def test_neighbours_of_one_role_are_one_message() -> None:
    messages = parse_messages(
        body(user(text("a")), user(text("b")), assistant(), assistant(text("c")), user(text("d")))
    )
    assert [(message.role, message.content) for message in messages.chat.messages] == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]


def test_an_answer_that_the_client_began_goes_on() -> None:
    options = parse_messages(body(user(text("q")), assistant(text("The answer is")))).chat.template_options
    assert options["continue_final_message"] is True
    assert options["add_generation_prompt"] is False
    with pytest.raises(InvalidRequest, match="no text to go on from"):
        parse_messages(body(user(text("q")), assistant(text("Look."), USE)))


@pytest.mark.parametrize(
    ("choice", "expected", "is_parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, ToolChoice("named", "look"), False),
    ],
)
def test_tools_and_the_choice_of_them(choice: Any, expected: ToolChoice, is_parallel: bool) -> None:
    chat = parse_messages(body(tools=TOOLS, tool_choice=choice)).chat
    assert chat.tools == (Tool("look", "Looks.", SCHEMA),)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, is_parallel)


@pytest.mark.parametrize(
    ("thinking", "expected", "is_on"),
    [
        (None, Thinking(), False),
        ({"type": "disabled"}, Thinking(), False),
        ({"type": "enabled", "budget_tokens": 1024}, Thinking(is_shown=True), True),
        ({"type": "adaptive"}, Thinking(is_shown=True), True),
        ({"type": "adaptive", "display": "omitted"}, Thinking(is_shown=True, is_emptied=True), True),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(thinking: Any, expected: Thinking, is_on: bool) -> None:
    call = parse_messages(body(thinking=thinking))
    assert call.thinking == expected
    assert call.chat.template_options == {"enable_thinking": is_on}


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("messages[1].content[0].tool_use_id", body(user(text("q")), user(RESULT))),
    ("messages[0].content[0].type", body(user(USE))),
    ("messages[1].content[0].type", body(user(text("q")), assistant(RESULT))),
    ("messages[1].content[1].id", body(user(text("q")), assistant(USE, USE))),
    ("messages[1].content[0].input", body(user(text("q")), assistant({**USE, "input": "x"}))),
    ("messages[1].content[0].name", body(user(text("q")), assistant({**USE, "name": ""}))),
    ("messages[2].content[0].content[0].type", body(user(text("q")), assistant(USE), user(RESULT | {"content": [{}]}))),
    ("messages[2].content[0].is_error", body(user(text("q")), assistant(USE), user({**RESULT, "is_error": 1}))),
    ("messages[0]", body("x")),
    ("messages[0].content[0]", body(user(5))),
    ("system[0].type", body(system=[{"type": "image"}])),
    ("tools[1]", body(tools=TOOLS * 2)),
    ("tool_choice.name", body(tools=TOOLS, tool_choice={"type": "tool", "name": "other"})),
    ("tool_choice.disable_parallel_tool_use", body(tool_choice={"type": "auto", "disable_parallel_tool_use": 1})),
]  # fmt: skip


@pytest.mark.parametrize(("param", "bad"), REFUSED, ids=[param for param, _ in REFUSED])
def test_what_is_not_understood_is_refused_by_its_path(param: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(bad)
    assert caught.value.param == param


def test_counting_needs_no_max_tokens_and_never_streams() -> None:
    asked = body(stream=True)
    del asked["max_tokens"]
    call = parse_count(asked)
    assert not call.chat.stream
    assert not call.chat.sampling.HasField("max_tokens")
