"""Items of the Responses API, read before or stored, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from naru_proto.errors import InvalidRequest
from naru_router.core.chat_request import ChatMessage, ToolCall
from naru_router.core.fields import shown

_LEADING = ("system", "developer")


@dataclass(slots=True)
class _Answer:
    """What an assistant did in one turn: it thought, it spoke, it called tools."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def made(self) -> ChatMessage:
        return ChatMessage(
            "assistant", "".join(self.texts), tool_calls=tuple(self.calls), reasoning="\n".join(self.thoughts)
        )


def messages_of(instructions: str, items: Sequence[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """The messages: instructions first, joined with the system's messages that the items begin with.

    Raises:
        InvalidRequest: an output of a call that was not made.
    """
    num_leading = next((i for i, item in enumerate(items) if item.get("role") not in _LEADING), len(items))
    rules = [instructions] if instructions else []
    rules += [_text(item["content"]) for item in items[:num_leading]]
    messages = [ChatMessage("system", "\n\n".join(rules))] if rules else []
    return (*messages, *_rest(items[num_leading:]))


def _rest(items: Sequence[dict[str, Any]]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    names: dict[str, str] = {}
    answer: _Answer | None = None
    for item in items:
        kind, role = item["type"], item.get("role")
        if kind in ("function_call", "reasoning") or role == "assistant":
            if answer is None or _begins_anew(answer, kind):
                messages += [answer.made()] if answer is not None else []
                answer = _Answer()
            _add(answer, item)
            if kind == "function_call":
                names[item["call_id"]] = item["name"]
            continue
        messages += [answer.made()] if answer is not None else []
        answer = None
        messages.append(_output(item, names) if kind == "function_call_output" else _said(item))
    return [*messages, answer.made()] if answer is not None else messages


def _begins_anew(answer: _Answer, kind: str) -> bool:
    """Whether an item of this kind is the beginning of another turn: one thinks, then speaks, then calls."""
    return kind != "function_call" and bool(answer.calls or answer.texts)


def _add(answer: _Answer, item: dict[str, Any]) -> None:
    if item["type"] == "function_call":
        answer.calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
    elif item["type"] == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [])
        answer.thoughts += [text] if text else []
    else:
        answer.texts.append(_text(item["content"]))


def _output(item: dict[str, Any], names: dict[str, str]) -> ChatMessage:
    call_id = item["call_id"]
    if call_id not in names:
        message = f"a function_call_output has the call_id {shown(call_id)}; no function_call before it has that id"
        raise InvalidRequest(message, param="input")
    return ChatMessage("tool", item["output"], name=names[call_id], tool_call_id=call_id)


def _said(item: dict[str, Any]) -> ChatMessage:
    return ChatMessage(item["role"], _text(item["content"]))


def _text(parts: Sequence[dict[str, Any]]) -> str:
    return "".join([part["text"] for part in parts])
