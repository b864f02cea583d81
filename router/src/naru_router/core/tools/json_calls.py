"""Reads one call that is written as JSON, piece by piece: `{"name": …, "arguments": …}`, or a name and then an object.

Used by the readers of model output. Arguments go on as they are written, the moment they come; nothing is parsed that
does not have to be, and nothing a model writes raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from typing import Protocol

from naru_router.core.tools.json_scan import ValueScanner


class CallSink(Protocol):
    """Takes what is read."""

    def open(self, name: str) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """More of its arguments."""


class CallBody(Protocol):
    """Reads one call."""

    is_certain: bool
    """It is a call, and has been opened: what was fed cannot become text again."""
    has_failed: bool
    """It is none; only while not certain."""

    def feed(self, text: str) -> str | None:
        """Takes more. None: more may follow; else the call has ended (or failed), and this is what comes after it."""

    def finish(self) -> None:
        """The output has ended; gives what was withheld of a certain call."""


_SPACE = " \t\r\n"


class JsonCall:
    """An object with a name and arguments, in either order; other members are passed over."""

    def __init__(self, sink: CallSink, names: Container[str] | None = None) -> None:
        """`names`: an object that names none of them is no call; None: every name is taken."""
        self.is_certain = False
        self.has_failed = False
        self._sink = sink
        self._names = names
        self._step = self._begin
        self._key = ""
        self._name: str | None = None
        self._pieces: list[str] = []
        """Of the value that is being read, where it is withheld."""
        self._arguments: str | None = None
        self._has_arguments = False
        self._scanner: ValueScanner | None = None
        self._streams = False
        self._has_ended = False
        self._text = ""
        self._at = 0

    def feed(self, text: str) -> str | None:
        """Takes more; see CallBody."""
        self._text, self._at = text, 0
        while self._at < len(text) and not (self._has_ended or self.has_failed):
            self._step()
        if not (self._has_ended or self.has_failed):
            return None
        return text[self._at :]

    def finish(self) -> None:
        """Gives what was withheld of arguments that were cut."""
        if self.is_certain and not self._streams and self._scanner is not None and self._key in _ARGUMENT_KEYS:
            self._sink.arguments("".join(self._pieces))

    def _space(self) -> str:
        """The next character that is no space, not taken yet; empty: there is none."""
        text, at = self._text, self._at
        while at < len(text) and text[at] in _SPACE:
            at += 1
        self._at = at
        return text[at] if at < len(text) else ""

    def _wrong(self) -> None:
        """Not what JSON wants here: a call that was opened ends, another one never was."""
        if self.is_certain:
            self._has_ended = True
        else:
            self.has_failed = True

    def _begin(self) -> None:
        if self._space() == "{":
            self._at += 1
            self._step = self._want_key
        elif self._at < len(self._text):
            self._wrong()

    def _want_key(self) -> None:
        char = self._space()
        if char == "}":
            self._at += 1
            self._end()
        elif char == '"':
            self._start_value(self._read_key)
        elif char:
            self._wrong()

    def _read_key(self) -> None:
        raw = self._take_value()
        if raw is not None:
            self._key = _decoded(raw) or ""
            self._step = self._want_colon
            if self._names is not None and not self.is_certain and self._key not in _CALL_KEYS:
                self.has_failed = True  # an answer in JSON, which need not wait for its end

    def _want_colon(self) -> None:
        char = self._space()
        if char == ":":
            self._at += 1
            self._step = self._want_value
        elif char:
            self._wrong()

    def _want_value(self) -> None:
        char = self._space()
        if not char:
            return
        if char in ",}]:":
            self._wrong()
            return
        is_first = self._key in _ARGUMENT_KEYS and not self._has_arguments
        if is_first and self._name is not None and not self.is_certain:
            self._open()
            if self.has_failed:
                return
        self._start_value(self._read_value)
        self._streams = is_first and self.is_certain and char in "{["

    def _start_value(self, step: object) -> None:
        self._scanner = ValueScanner(self._text[self._at])
        self._pieces = []
        self._step = step  # type: ignore[assignment]

    def _take_value(self) -> str | None:
        """The whole value, once it is here."""
        assert self._scanner is not None
        end = self._scanner.feed(self._text, self._at)
        stop = len(self._text) if end < 0 else end
        self._pieces.append(self._text[self._at : stop])
        self._at = stop
        if end < 0:
            return None
        self._scanner = None
        return "".join(self._pieces)

    def _read_value(self) -> None:
        if self._streams:
            self._stream_value()
            return
        raw = self._take_value()
        if raw is None:
            return
        self._step = self._want_comma
        if self._key == "name" and self._name is None:
            self._name = _decoded(raw)
            if self._name is None:
                self._wrong()
            elif self._has_arguments:
                self._open()
                if not self.has_failed:
                    self._sink.arguments(self._arguments or "{}")
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._arguments = _as_arguments(raw)
            if self.is_certain:
                self._sink.arguments(self._arguments)

    def _stream_value(self) -> None:
        assert self._scanner is not None
        at = self._at
        end = self._scanner.feed(self._text, at)
        stop = len(self._text) if end < 0 else end
        self._sink.arguments(self._text[at:stop])
        self._at = stop
        if end >= 0:
            self._scanner = None
            self._streams = False
            self._has_arguments = True
            self._step = self._want_comma

    def _want_comma(self) -> None:
        char = self._space()
        if char == ",":
            self._at += 1
            self._step = self._want_key
        elif char == "}":
            self._at += 1
            self._end()
        elif char:
            self._wrong()

    def _open(self) -> None:
        assert self._name is not None
        if not self._name or (self._names is not None and self._name not in self._names):
            self.has_failed = True
            return
        self.is_certain = True
        self._sink.open(self._name)

    def _end(self) -> None:
        if self._name is None:
            self._wrong()
            return
        if not self.is_certain:
            self._open()
            if self.has_failed:
                return
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._has_ended = True


_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})


def _decoded(raw: str) -> str | None:
    """The text of a JSON string; None: it is none."""
    try:
        value = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, str):
        return None
    return value.encode("utf-8", "replace").decode("utf-8")


def _as_arguments(raw: str) -> str:
    """Arguments as one JSON object where they were written as a string of it, or left out."""
    if raw in ("null", "None", '""', ""):
        return "{}"
    if raw.startswith('"'):
        text = _decoded(raw)
        if text is not None and text.lstrip().startswith("{"):
            return text
    return raw


class NamedCall:
    """A name, then its arguments as an object: `NAME[ARGS]{…}`, or `NAME{…}`."""

    _PATTERN = re.compile(r"\s*([A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?\s*(?=\{)")
    _MAX_HEAD_CHARS = 256

    def __init__(self, sink: CallSink) -> None:
        self.is_certain = False
        self.has_failed = False
        self._sink = sink
        self._head = ""
        self._scanner: ValueScanner | None = None

    def feed(self, text: str) -> str | None:
        """Takes more; see CallBody."""
        if self._scanner is None:
            self._head += text
            brace = self._head.find("{")
            if brace > self._MAX_HEAD_CHARS or (brace < 0 and len(self._head) > self._MAX_HEAD_CHARS):
                self.has_failed = True
                return ""
            if brace < 0:
                return None
            match = self._PATTERN.match(self._head)
            if match is None or match.end() != brace:
                self.has_failed = True
                return ""
            self.is_certain = True
            self._sink.open(match.group(1))
            self._scanner = ValueScanner("{")
            text = self._head[brace:]
        end = self._scanner.feed(text, 0)
        if end < 0:
            self._sink.arguments(text)
            return None
        self._sink.arguments(text[:end])
        return text[end:]

    def finish(self) -> None:
        """Nothing is withheld."""
