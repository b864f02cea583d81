"""The messages of a Messages body as messages of a chat: blocks are joined, results of tools stand by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import ChatMessage, ToolCall
from naru_router.core.checked_json import check_object, json_text
from naru_router.core.fields import Fields, check_text, refuse, shown

_ROLES = ("user", "assistant", "system")
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""By role."""


@dataclass(slots=True)
class _Draft:
    """A message that more may be added to."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None
    name: str | None = None

    def made(self) -> ChatMessage:
        return ChatMessage(
            self.role,
            "\n".join(self.texts),
            name=self.name,
            tool_call_id=self.call_id,
            tool_calls=tuple(self.calls),
            reasoning="\n".join(self.thoughts),
        )


def read_conversation(fields: Fields) -> tuple[ChatMessage, ...]:
    """The messages of `system` and `messages`. Neighbours of one role become one message, their texts on lines.

    Raises:
        InvalidRequest: naming the block that is not understood.
    """
    reader = _Reader()
    system = fields.get("system")
    if system is not None:
        reader.add_system(system)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", messages, "an array of at least one message")
    for index, message in enumerate(messages):
        reader.add(f"messages[{index}]", message)
    return reader.made()


class _Reader:
    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._tools: dict[str, str] = {}
        """Names of tools by the ids of their calls."""

    def add_system(self, value: object) -> None:
        draft = self._draft("system")
        if isinstance(value, str):
            draft.texts.append(check_text("system", value))
            return
        if not isinstance(value, list):
            refuse("system", value, "a string or an array of text blocks")
        for path, block in _blocks("system", value):
            draft.texts.append(_text(path, block, ("text",)))

    def add(self, path: str, message: object) -> None:
        if not isinstance(message, dict):
            refuse(path, message, "an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            refuse(f"{path}.role", role, f"one of {', '.join(_ROLES)}")
        if isinstance(content, str):
            self._draft(role).texts.append(check_text(f"{path}.content", content))
            return
        if not isinstance(content, list) or (not content and role != "assistant"):
            refuse(f"{path}.content", content, "a string or an array of blocks")
        if role == "assistant":
            self._draft(role)
        for block_path, block in _blocks(f"{path}.content", content):
            self._add_block(role, block_path, block)

    def _add_block(self, role: str, path: str, block: Fields) -> None:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            self._add_result(block)
        elif kind == "tool_use" and role == "assistant":
            self._draft(role).calls.append(self._call(block))
        elif kind == "thinking" and role == "assistant":
            self._draft(role).thoughts.append(check_text(block.path("thinking"), block.get("thinking")))
        elif kind == "redacted_thinking" and role == "assistant":
            pass  # sealed by another server: nothing here can read it
        else:
            self._draft(role).texts.append(_text(path, block, _BLOCKS[role]))

    def _call(self, block: Fields) -> ToolCall:
        call_id, name = _filled(block, "id"), _filled(block, "name")
        if call_id in self._tools:
            raise InvalidRequest(
                f"{block.path('id')} is {shown(call_id)}, the id of an earlier tool_use; ids must differ",
                param=block.path("id"),
            )
        self._tools[call_id] = name
        path = block.path("input")
        return ToolCall(call_id, name, json_text(path, check_object(path, block.get("input"))))

    def _add_result(self, block: Fields) -> None:
        call_id = _filled(block, "tool_use_id")
        if call_id not in self._tools:
            message = f"{block.path('tool_use_id')} is {shown(call_id)}; no tool_use before it has that id"
            raise InvalidRequest(message, param=block.path("tool_use_id"))
        texts = ["Error:"] if block.boolean("is_error") else []
        path, content = block.path("content"), block.get("content")
        if isinstance(content, str):
            texts.append(check_text(path, content))
        elif isinstance(content, list):
            texts += [_text(part_path, part, ("text",)) for part_path, part in _blocks(path, content)]
        elif content is not None:
            refuse(path, content, "a string or an array of text blocks")
        self._drafts.append(_Draft("tool", texts, call_id=call_id, name=self._tools[call_id]))

    def _draft(self, role: str) -> _Draft:
        if not self._drafts or self._drafts[-1].role != role:
            self._drafts.append(_Draft(role))
        return self._drafts[-1]

    def made(self) -> tuple[ChatMessage, ...]:
        return tuple([draft.made() for draft in self._drafts])


def _blocks(path: str, values: list[object]) -> list[tuple[str, Fields]]:
    found = []
    for index, value in enumerate(values):
        block_path = f"{path}[{index}]"
        if not isinstance(value, dict):
            refuse(block_path, value, "an object with a type")
        found.append((block_path, Fields(value, f"{block_path}.")))
    return found


def _text(path: str, block: Fields, allowed: tuple[str, ...]) -> str:
    if block.get("type") != "text":
        refuse(f"{path}.type", block.get("type"), f"{' or '.join(allowed)} here: other blocks are not supported")
    return check_text(block.path("text"), block.get("text"))


def _filled(block: Fields, name: str) -> str:
    text = check_text(block.path(name), block.get(name))
    if not text:
        refuse(block.path(name), text, "a text that is not empty")
    return text
