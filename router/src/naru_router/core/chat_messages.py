"""The messages of a chat, checked. Read by the parsers of all chat APIs; rendering them is the templates' part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from naru_proto.errors import InvalidRequest
from naru_router.core.fields import Fields, check_text, refuse, shown
from naru_router.core.tools.declared import ToolCall, check_name

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_ID_CHARS = 256
_LEGACY_ROLE = "function"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; parts of text are joined into one string."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What an assistant's message said it had thought."""


def read_messages(values: object) -> tuple[ChatMessage, ...]:
    """The messages of a chat, as JSON gives them.

    Raises:
        InvalidRequest: none, or one that is not understood.
    """
    if not isinstance(values, list) or not values:
        refuse("messages", values, "an array of at least one message")
    return tuple([_read_plainly(value) or _read_message(i, value) for i, value in enumerate(values)])


def check_conversation(messages: Sequence[ChatMessage]) -> None:
    """Checks that results of tools answer calls that were made before.

    Raises:
        InvalidRequest: naming the message.
    """
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.call_id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            path = f"messages[{index}].tool_call_id"
            text = f"{path} is {shown(message.tool_call_id)}; it must be the id of a call in a message before it"
            raise InvalidRequest(text, param=path)


def _read_plainly(value: object) -> ChatMessage | None:
    """A message of a role and a text, as nearly all are; None: it takes a closer look."""
    if type(value) is not dict or len(value) != 2:
        return None
    role, content = value.get("role"), value.get("content")
    if isinstance(content, str) and content.isascii() and isinstance(role, str) and role in ROLES:
        return ChatMessage(role, content)
    return None


def _read_message(index: int, value: object) -> ChatMessage:
    path = f"messages[{index}]"
    if not isinstance(value, dict):
        refuse(path, value, "an object with role and content")
    fields = Fields(value, f"{path}.")
    role = fields.get("role")
    if role == _LEGACY_ROLE:
        return _read_legacy_result(fields)
    if role not in ROLES:
        refuse(fields.path("role"), role, f"one of {', '.join(ROLES)}")
    role = str(role)
    if fields.get("audio") is not None:
        refuse(fields.path("audio"), fields.get("audio"), "absent: it is not supported")
    calls, reasoning = _read_calls(fields, role), ""
    if role == "assistant":
        reasoning = fields.text("reasoning_content") or fields.text("reasoning") or ""
    content = _read_content(fields, role, may_be_absent=bool(calls or reasoning))
    return ChatMessage(role, content, fields.text("name"), _read_id(fields, "tool_call_id"), calls, reasoning)


def _read_calls(fields: Fields, role: str) -> tuple[ToolCall, ...]:
    values, legacy = fields.array("tool_calls") or [], fields.object("function_call")
    if (values or legacy) and role != "assistant":
        name = "tool_calls" if values else "function_call"
        refuse(fields.path(name), fields.get(name), "absent: only the assistant's messages have calls")
    calls = [_read_call(fields.path(f"tool_calls[{index}]"), value) for index, value in enumerate(values)]
    if len({call.call_id for call in calls}) < len(calls):
        raise InvalidRequest(f"{fields.path('tool_calls')} has two calls of one id", param=fields.path("tool_calls"))
    if legacy is not None:
        calls.append(_called(legacy, _legacy_id(str(legacy.get("name")))))
    return tuple(calls)


def _read_call(path: str, value: object) -> ToolCall:
    if not isinstance(value, dict):
        refuse(path, value, "an object with id, type and function")
    fields = Fields(value, f"{path}.")
    kind, function, call_id = fields.get("type"), fields.object("function"), _read_id(fields, "id")
    if kind not in (None, "function"):
        refuse(fields.path("type"), kind, "function")
    if function is None:
        refuse(fields.path("function"), None, "an object with name and arguments")
    if not call_id:
        refuse(fields.path("id"), call_id, "the id that the call was given")
    return _called(function, call_id)


def _called(function: Fields, call_id: str) -> ToolCall:
    name = check_name(function.path("name"), function.get("name"))
    arguments = function.text("arguments")
    return ToolCall(call_id, name, "{}" if arguments is None else arguments)


def _read_legacy_result(fields: Fields) -> ChatMessage:
    name = check_name(fields.path("name"), fields.get("name"))
    return ChatMessage("tool", _read_content(fields, "tool", may_be_absent=False), name, _legacy_id(name))


def _legacy_id(name: str) -> str:
    """Functions are called one at a time and have no ids: the result belongs to the last call of its name."""
    return f"call_of_{name}"


def _read_id(fields: Fields, name: str) -> str | None:
    value = fields.text(name)
    if value is not None and len(value) > MAX_ID_CHARS:
        refuse(fields.path(name), value, f"of at most {MAX_ID_CHARS} characters")
    return value


def _read_content(fields: Fields, role: str, *, may_be_absent: bool) -> str:
    path, value = fields.path("content"), fields.get("content")
    if isinstance(value, str):
        return check_text(path, value)
    if value is None and may_be_absent:
        return ""
    if not isinstance(value, list) or not value:
        refuse(path, value, "a string or an array of text parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else part
        is_refusal = kind == "refusal" and role == "assistant"
        if not isinstance(part, dict) or (kind != "text" and not is_refusal):
            refuse(f"{path}[{i}].type", kind, "text: other parts are not supported by this model")
        name = "refusal" if is_refusal else "text"
        texts.append(check_text(f"{path}[{i}].{name}", part.get(name)))
    return "".join(texts)
