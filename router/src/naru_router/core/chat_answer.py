"""The message of a whole chat answer: what its text is made of, put together. Used by the collector of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from naru_router.core.chat_parts import OutputReader, Part, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.chunks_parts import older_reason

PIECE_CHARS = 1024


def read_message(
    text: str, reason: str | None, make_reader: Callable[[], OutputReader], *, writes_function_call: bool = False
) -> tuple[dict[str, object], str | None]:
    """(the message, the finish reason) of a choice's whole text.

    `writes_function_call`: a call has the older form, which has room for one.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for part in _parts(make_reader(), text):
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, ReasoningPart):
            thoughts.append(part.text)
        elif isinstance(part, ToolCallPart):
            if part.call_id:
                calls.append((part.call_id, part.name, []))
            calls[-1][2].append(part.arguments)
    message: dict[str, object] = {"role": "assistant", "content": "".join(texts), "refusal": None}
    if thoughts or calls:
        message["content"] = message["content"] or None
    if thoughts:
        message["reasoning_content"] = message["reasoning"] = "".join(thoughts)
    if not calls:
        return message, reason
    if reason == "stop":
        reason = "tool_calls"
    if writes_function_call:
        _, name, arguments = calls[0]
        message["function_call"] = {"name": name, "arguments": "".join(arguments)}
        return message, older_reason(reason or "")
    message["tool_calls"] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
        for call_id, name, arguments in calls
    ]
    return message, reason


def _parts(reader: OutputReader, text: str) -> Iterator[Part]:
    # In pieces: what looks like many marks and is none is looked at again and again, but never all of a long text.
    for at in range(0, len(text), PIECE_CHARS):
        yield from reader.feed(text[at : at + PIECE_CHARS])
    yield from reader.finish()
