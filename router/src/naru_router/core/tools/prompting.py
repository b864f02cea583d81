"""What a chat with tools shows to the model's template: tools and calls in the form templates expect.

Where a template knows nothing of tools, they are told in the system message, calls become the assistant's text, and
results the user's. Used by the planner; rendering is done elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_messages import ChatMessage
from naru_router.core.json_values import check_json
from naru_router.core.tools.declared import Tool, ToolCall, ToolChoice

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}
_REFUSES_SYSTEM = re.compile(r"system role (is )?not supported", re.IGNORECASE)


def tool_values(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """The tools as templates take them."""
    return [{"type": "function", "function": function_value(tool)} for tool in tools]


def function_value(tool: Tool) -> dict[str, object]:
    """One of them."""
    value: dict[str, object] = {"name": tool.name}
    if tool.description:
        value["description"] = tool.description
    value["parameters"] = _NO_PARAMETERS if tool.parameters is None else tool.parameters
    if tool.is_strict:
        value["strict"] = True
    return value


def call_values(calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    """Calls of a message as templates take them."""
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments_value(call.arguments)},
        }
        for call in calls
    ]


def arguments_value(text: str) -> object:
    """The arguments as an object, which templates print themselves; what is none stays as it was written."""
    try:
        value = json.loads(text)
        check_json("arguments", value)
    except (ValueError, RecursionError, InvalidRequest):
        return text
    return value if isinstance(value, dict) else text


def with_short_ids(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Ids of calls and results as templates want them that take nine letters and digits; the same ones for the same."""
    return tuple(
        message
        if message.tool_call_id is None and not message.tool_calls
        else replace(
            message,
            tool_call_id=None if message.tool_call_id is None else short_id(message.tool_call_id),
            tool_calls=tuple(replace(call, call_id=short_id(call.call_id)) for call in message.tool_calls),
        )
        for message in messages
    )


def short_id(call_id: str) -> str:
    """Nine letters and digits that stand for an id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
    return base64.b32encode(digest).decode("ascii")[:9]


def told_in_text(
    messages: Sequence[ChatMessage], tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool, template: str
) -> tuple[ChatMessage, ...]:
    """The chat for a template that knows nothing of tools."""
    told: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            content = f"<tool_response>\n{message.content}\n</tool_response>"
            if told and told[-1].role == "user" and told[-1].name == _RESULTS:
                told[-1] = ChatMessage("user", f"{told[-1].content}\n{content}", _RESULTS)
            else:
                told.append(ChatMessage("user", content, _RESULTS))
        elif message.tool_calls:
            calls = "\n".join(_written(call) for call in message.tool_calls)
            told.append(replace(message, content=f"{message.content}\n{calls}".lstrip("\n"), tool_calls=()))
        else:
            told.append(message)
    chat = [replace(message, name=None) if message.name == _RESULTS else message for message in told]
    return tuple(_with_instructions(chat, _instructions(tools, choice, is_parallel), template) if tools else chat)


_RESULTS = "\0results"
"""Marks messages of results while they are put together; no client can send it, as it is left out at once."""


def _written(call: ToolCall) -> str:
    value = json.dumps({"name": call.name, "arguments": arguments_value(call.arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{value}\n</tool_call>"


def _with_instructions(chat: list[ChatMessage], text: str, template: str) -> list[ChatMessage]:
    if chat[0].role in ("system", "developer"):
        return [replace(chat[0], content=f"{chat[0].content}\n\n{text}"), *chat[1:]]
    if _REFUSES_SYSTEM.search(template):
        for index, message in enumerate(chat):
            if message.role == "user":
                told = replace(message, content=f"{text}\n\n{message.content}")
                return [*chat[:index], told, *chat[index + 1 :]]
    return [ChatMessage("system", text), *chat]


def _instructions(tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool) -> str:
    functions = "\n".join(json.dumps(function_value(tool), ensure_ascii=False) for tool in tools)
    if choice.mode == "auto":
        when = "Call a function when it helps to answer; where none does, answer in plain text."
    elif choice.mode == "required":
        when = "Your answer has to be a call."
    else:
        when = f"Your answer has to be a call of {choice.name}."
    many = "To call several, write several such blocks." if is_parallel else "Call one function at most."
    return (
        "You can call functions. These are there, one on each line:\n"
        f"{functions}\n\n"
        "To call a function, write its name and its arguments as JSON in a block like this:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>\n'
        f"{many} Results come back in <tool_response> blocks. {when}"
    )
