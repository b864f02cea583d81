"""What a chat template prints around the contents of messages, kept for each sequence of roles. Used by the renderer.

Most templates never look at what messages say (`template_flow` proves it), so that chats of the same roles differ in
their contents alone. The first such chat is rendered twice, once with marks for its contents; later ones are put
together from what stood between the marks. Rendering a short chat takes 16 µs, and as much again for what it drives out
of the processor's caches; this takes one.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

from naru_router.core.chat_request import ChatMessage

MAX_SKELETONS = 512
MAX_MESSAGES = 64
MAX_SKELETON_CHARS = 64 * 1024
_EDGE = "\u2005\u2004"
"""Around each mark: where it is missing in the output, the template trims contents on that side."""

Render = Callable[[Sequence[ChatMessage]], str]
Key = tuple[str, ...]
_Slot = tuple[int, bool, bool]
"""Index of a message, and whether its content is trimmed on the left and on the right."""


class Skeletons:
    """Of one template."""

    def __init__(self) -> None:
        self._known: OrderedDict[Key, list[str | _Slot] | None] = OrderedDict()
        """None: chats of these roles are rendered."""

    def fill(self, messages: Sequence[ChatMessage]) -> str | None:
        """The prompt of a chat, where its skeleton is known."""
        key = _key(messages)
        pieces = None if key is None else self._known.get(key)
        if pieces is None:
            return None
        return "".join([piece if type(piece) is str else _content(messages, piece) for piece in pieces])  # type: ignore[arg-type]

    def learn(self, messages: Sequence[ChatMessage], text: str, render: Render) -> None:
        """Takes a chat and what it was rendered to; `render` renders another one, and may raise."""
        key = _key(messages)
        if key is None or key in self._known:
            return
        self._known[key] = None
        if len(self._known) > MAX_SKELETONS:
            self._known.popitem(last=False)
        marks = [f"{secrets.token_hex(8)}-{index}-" for index in range(len(messages))]
        marked = [
            ChatMessage(message.role, f"{_EDGE}{mark}{_EDGE[::-1]}" if message.content else "")
            for message, mark in zip(messages, marks, strict=True)
        ]
        pieces = _cut(render(marked), marks)
        self._known[key] = pieces
        if (
            sum(len(piece) for piece in pieces if isinstance(piece, str)) > MAX_SKELETON_CHARS
            or self.fill(messages) != text
        ):
            self._known[key] = None


def _key(messages: Sequence[ChatMessage]) -> Key | None:
    """Equal for chats with one skeleton; None: it has none."""
    if len(messages) > MAX_MESSAGES:
        return None
    key = []
    for message in messages:
        if message.name is not None or message.tool_call_id is not None or message.tool_calls or message.reasoning:
            return None
        key.append(message.role if message.content else f"{message.role} without content")
    return tuple(key)


def _cut(text: str, marks: Sequence[str]) -> list[str | _Slot]:
    """What stands between the marks, and the marks as slots."""
    pieces: list[str | _Slot] = []
    while True:
        found = [(at, index) for index, mark in enumerate(marks) if (at := text.find(mark)) >= 0]
        if not found:
            pieces.append(text)
            return pieces
        at, index = min(found)
        before, text = text[:at], text[at + len(marks[index]) :]
        is_left, is_right = before.endswith(_EDGE), text.startswith(_EDGE[::-1])
        pieces.append(before[: -len(_EDGE)] if is_left else before)
        pieces.append((index, not is_left, not is_right))
        text = text[len(_EDGE) :] if is_right else text


def _content(messages: Sequence[ChatMessage], slot: _Slot) -> str:
    index, is_left_trimmed, is_right_trimmed = slot
    content = messages[index].content
    if is_left_trimmed:
        content = content.lstrip()
    return content.rstrip() if is_right_trimmed else content
