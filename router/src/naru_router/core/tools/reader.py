"""Reads what a model writes, piece by piece: text, reasoning and calls of tools, told apart by the style's marks.

One reader serves one choice. What is certain leaves at once; only what may still become a mark is withheld, and blanks
before it. Nothing is lost: what looks like a call and is none is given as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from naru_router.core.chat_parts import Part, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.tools.declared import Tool
from naru_router.core.tools.json_calls import CallBody, JsonCall, NamedCall
from naru_router.core.tools.marks import BLANKS, MAX_BLANKS, mark_begin, without_blanks
from naru_router.core.tools.styles import Style
from naru_router.core.tools.tagged_calls import FUNCTION_MARK, PythonCall, TaggedCall

MAX_LEAD_CHARS = 256
"""Between a mark and its first call, where more of it can only be text."""
_BETWEEN = frozenset(" \t\r\n[],;}")
"""What stands between the calls of one mark, closing braces too many included."""
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_MANY = 1 << 30


class StyledReader:
    """Reads one choice of one style."""

    def __init__(
        self,
        style: Style,
        new_id: Callable[[], str],
        *,
        tools: Mapping[str, Tool] | None = None,
        max_calls: int = 0,
        primer: str = "",
        shows_reasoning: bool = True,
    ) -> None:
        """Of a choice that has said nothing yet.

        Args:
            style: how the model writes.
            new_id: makes an id for each call.
            tools: what may be called, by name; None: there are no calls, whatever is written.
            max_calls: further ones are left out; 0: there is no limit.
            primer: what the prompt ends with of the answer, such as a mark; it is read, and never given as text.
            shows_reasoning: False: it is left out.
        """
        self._style = style
        self._new_id = new_id
        self._tools = tools
        self._marks = style.call_marks if tools is not None else ()
        self._edges = [mark for mark in (style.call_close, *self._marks) if mark]
        """What may stand where a call could begin."""
        self._function_mark = FUNCTION_MARK if style.call_marks == ("<tool_call>",) else ""
        self._max_calls = max_calls or _MANY
        self._shows_reasoning = shows_reasoning
        self._rest = ""
        self._parts: list[Part] = []
        self._skips_blanks = False
        self._num_calls = 0
        self._mark = ""
        self._opening = ""
        """The mark, and the blanks before it."""
        self._lead = ""
        """What has come since the mark and is no call; while none has."""
        self._has_called = False
        """In the block of this mark."""
        self._body: CallBody | None = None
        self._held: list[str] = []
        """What the body was fed while it may still be text."""
        self._step = self._read_start
        self._primer = primer
        """Until a call of it is certain."""
        self._parts = list(self.feed(primer))

    def feed(self, text: str) -> Sequence[Part]:
        """What is certain now."""
        if not text:
            return ()
        self._rest = self._rest + text if self._rest else text
        while self._step():
            pass
        if not self._parts:
            return ()
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> Sequence[Part]:
        """The choice has ended: what was withheld."""
        rest, self._rest = self._rest, ""
        if self._step == self._read_reasoning:
            self._reason(rest)
        elif self._step == self._read_body:
            assert self._body is not None
            if self._body.is_certain:
                self._body.finish()
            else:
                self._say(self._opening + self._lead + "".join(self._held))
        elif self._step == self._read_between:
            if not self._has_called:
                self._say(self._opening + self._lead + rest)
        elif not self._skips_blanks or rest.strip(BLANKS):
            self._say(rest)
        self._step = self._read_text
        parts, self._parts = self._parts, []
        return parts

    # What a call's reader gives.

    def open(self, name: str) -> None:
        """A call begins."""
        self._num_calls += 1
        self._has_called = True
        self._primer = ""
        if self._num_calls <= self._max_calls:
            self._parts.append(ToolCallPart(self._num_calls - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        if text and self._num_calls <= self._max_calls:
            self._parts.append(ToolCallPart(self._num_calls - 1, arguments=text))

    # The steps: each takes something off the rest and says whether there may be more to do.

    def _read_start(self) -> bool:
        """Up to the first character that says what the answer begins with."""
        rest = self._rest
        text = rest.lstrip(BLANKS)
        num_blanks = len(rest) - len(text)
        reasoning = self._style.reasoning
        if num_blanks > MAX_BLANKS:
            self._step = self._read_text
            return True
        if not text:
            return False
        if reasoning is not None and text[0] == reasoning[0][0]:
            mark = reasoning[0]
            if text.startswith(mark):
                self._rest, self._skips_blanks = text[len(mark) :], True
                self._primer = self._primer.removeprefix(mark)
                self._step = self._read_reasoning
                return True
            if mark.startswith(text):
                return False
        self._start_answer(rest, text)
        return True

    def _start_answer(self, rest: str, text: str) -> None:
        """`text`: the rest without its leading blanks."""
        if text[0] == "{" and self._tools is not None and self._style.takes_bare_json:
            self._enter_calls("")
            self._lead, self._rest = rest[: len(rest) - len(text)], text
        elif text[0] == "[" and self._tools is not None and self._style.name == "pythonic":
            self._enter_calls("")
            self._lead, self._rest = rest[: len(rest) - len(text)] + "[", text[1:]
        else:
            self._step = self._read_text

    def _read_reasoning(self) -> bool:
        if not self._drop_blanks():
            return False
        assert self._style.reasoning is not None
        mark = self._style.reasoning[1]
        rest = self._rest
        at = rest.find(mark)
        if at >= 0:
            self._reason(rest[: without_blanks(rest, at)])
            self._rest, self._skips_blanks = rest[at + len(mark) :], True
            self._step = self._read_answer_start
            return True
        keep = without_blanks(rest, mark_begin(rest, mark))
        self._reason(rest[:keep])
        self._rest = rest[keep:]
        return False

    def _read_answer_start(self) -> bool:
        if not self._drop_blanks():
            return False
        self._start_answer(self._rest, self._rest)
        return True

    def _read_text(self) -> bool:
        if not self._drop_blanks():
            return False
        rest, marks = self._rest, self._marks
        if not marks:
            self._rest = ""
            self._say(rest)
            return False
        found = [(at, mark) for mark in marks if (at := rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            end = without_blanks(rest, at)
            self._say(rest[:end])
            self._rest = rest[at + len(mark) :]
            self._enter_calls(mark, rest[end:at])
            return True
        keep = without_blanks(rest, min([mark_begin(rest, mark) for mark in marks]))
        self._say(rest[:keep])
        self._rest = rest[keep:]
        return False

    def _enter_calls(self, mark: str, blanks: str = "") -> None:
        self._mark, self._opening, self._lead, self._has_called = mark, blanks + mark, "", False
        self._step = self._read_between

    def _read_between(self) -> bool:
        """Up to a call, to the mark that closes them, or to what is neither."""
        rest, at = self._rest, 0
        while at < len(rest) and rest[at] in _BETWEEN and not self._may_begin_mark(rest, at):
            at += 1
        if not self._has_called:
            self._lead += rest[:at]
        rest = self._rest = rest[at:]
        if len(self._lead) > MAX_LEAD_CHARS:
            self._end_block("", rest)
            return True
        return self._begin_call(rest) if rest else False

    def _begin_call(self, rest: str) -> bool:
        ended = next((mark for mark in self._edges if rest.startswith(mark)), None)
        if ended is not None:
            self._end_block(ended, rest[len(ended) :])
            return True
        if any([mark.startswith(rest) for mark in self._edges]) or self._function_mark.startswith(rest):
            return False
        body = self._body_of(rest)
        if body is None:
            self._end_block("", rest)
        else:
            self._body, self._held, self._step = body, [], self._read_body
        return True

    def _may_begin_mark(self, rest: str, at: int) -> bool:
        """Marks may begin with a character that also stands between calls."""
        if rest[at] != "[":
            return False
        tail = rest[at:]
        return any(tail.startswith(mark) or mark.startswith(tail) for mark in self._marks)

    def _end_block(self, mark: str, rest: str) -> None:
        """`mark`: what ended it; empty: something that is no call."""
        if mark and mark != self._style.call_close:
            self._rest = rest
            if not self._has_called:
                self._say(self._opening + self._lead)
            self._enter_calls(mark)
            return
        if not self._has_called:
            self._say(self._opening + self._lead + mark)
        self._skips_blanks = self._has_called
        self._rest, self._step = rest, self._read_text

    def _body_of(self, rest: str) -> CallBody | None:
        assert self._tools is not None
        name = self._style.name
        if name == "pythonic":
            return PythonCall(self) if rest[0] in _NAME_CHARS else None
        if rest[0] == "{":
            # Without a mark an answer in JSON is taken for a call only where it names a tool.
            return JsonCall(self, None if self._mark else self._tools)
        if self._function_mark and rest.startswith(FUNCTION_MARK):
            return TaggedCall(self, self._tools)
        if rest[0] in _NAME_CHARS and self._style.has_short_ids:
            return NamedCall(self)
        return None

    def _read_body(self) -> bool:
        body, rest = self._body, self._rest
        assert body is not None
        if not rest:
            return False
        if not body.is_certain:
            self._held.append(rest)
        self._rest = ""
        left = body.feed(rest)
        if body.has_failed:
            self._fail()
            return True
        if left is None:
            return False
        self._rest, self._body, self._held = left, None, []
        self._step = self._read_between
        return True

    def _fail(self) -> None:
        """It was no call: all of it is text, and may have marks in it."""
        if not self._has_called:
            self._say(self._opening + self._lead)
        self._rest, self._body, self._held = "".join(self._held), None, []
        self._skips_blanks = False
        self._step = self._read_text

    def _drop_blanks(self) -> bool:
        """Whether something else is left."""
        if self._skips_blanks:
            self._rest = self._rest.lstrip(BLANKS)
            if self._rest:
                self._skips_blanks = False
        return bool(self._rest)

    def _say(self, text: str) -> None:
        if text and self._primer:
            text, self._primer = text.removeprefix(self._primer), ""
        if text:
            self._parts.append(TextPart(text))

    def _reason(self, text: str) -> None:
        if text and self._shows_reasoning:
            self._parts.append(ReasoningPart(text))
