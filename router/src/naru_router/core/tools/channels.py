"""Reads what models write that speak on channels: analysis is reasoning, final is text, commentary may be a call.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME …<|message|>{…}``
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from naru_router.core.chat_parts import Part, ReasoningPart, TextPart, ToolCallPart

FINAL = "<|channel|>final<|message|>"
MAX_HEAD_CHARS = 512
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEAD_BEGINS = ("<|channel|>", "<|start|>", "to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,128})")


def call_head(name: str) -> str:
    """How a call of a function begins."""
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


class ChannelReader:
    """Reads one choice."""

    def __init__(
        self,
        new_id: Callable[[], str],
        *,
        takes_calls: bool,
        max_calls: int = 0,
        primer: str = "",
        shows_reasoning: bool = True,
    ) -> None:
        """See StyledReader; `takes_calls`: there are tools."""
        self._new_id = new_id
        self._takes_calls = takes_calls
        self._max_calls = max_calls
        self._shows_reasoning = shows_reasoning
        self._rest = ""
        self._parts: list[Part] = []
        self._is_in_head = True
        self._kind = "final"
        self._num_calls = 0
        self._primer = primer
        self._parts = list(self.feed(primer))

    def feed(self, text: str) -> Sequence[Part]:
        """What is certain now."""
        self._rest += text
        while self._rest and (self._read_head() if self._is_in_head else self._read_body()):
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> Sequence[Part]:
        """The choice has ended: what was withheld."""
        rest, self._rest = self._rest, ""
        if self._is_in_head:
            rest = rest.removeprefix(self._primer)
            if not any(rest.startswith(begin) for begin in _HEAD_BEGINS):
                self._kind = "final"
                self._give(rest)
        else:
            self._give(rest)
        parts, self._parts = self._parts, []
        return parts

    def _read_head(self) -> bool:
        """Up to a message's text."""
        rest = self._rest
        at = rest.find(_MESSAGE)
        text = rest.lstrip()
        is_head = any(text.startswith(begin) or begin.startswith(text) for begin in _HEAD_BEGINS)
        if not is_head or at > MAX_HEAD_CHARS or (at < 0 and len(rest) > MAX_HEAD_CHARS + len(_MESSAGE)):
            self._kind, self._is_in_head = "final", False
            return True
        if at < 0:
            return False
        head, self._rest = rest[:at], rest[at + len(_MESSAGE) :]
        self._is_in_head = False
        self._primer = ""
        channel, function = _CHANNEL.search(head), _FUNCTION.search(head)
        self._kind = channel.group(1) if channel else "final"
        if function is not None and self._takes_calls:
            self._kind = "call"
            self._num_calls += 1
            if self._may_call():
                self._parts.append(ToolCallPart(self._num_calls - 1, self._new_id(), function.group(1)))
        return True

    def _read_body(self) -> bool:
        rest = self._rest
        found = [(at, mark) for mark in _ENDS if (at := rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._give(rest[:at])
            # The mark that begins the next head is part of it.
            self._rest = rest[at:] if mark in _HEAD_BEGINS else rest[at + len(mark) :]
            self._is_in_head = True
            return True
        at = rest.rfind("<", max(0, len(rest) - len("<|channel|>") + 1))
        if at >= 0 and any(mark.startswith(rest[at:]) for mark in _ENDS):
            self._give(rest[:at])
            self._rest = rest[at:]
            return False
        self._give(rest)
        self._rest = ""
        return False

    def _may_call(self) -> bool:
        return not self._max_calls or self._num_calls <= self._max_calls

    def _give(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            if self._may_call():
                self._parts.append(ToolCallPart(self._num_calls - 1, arguments=text))
        elif self._kind == "analysis":
            if self._shows_reasoning:
                self._parts.append(ReasoningPart(text))
        else:
            self._parts.append(TextPart(text))
