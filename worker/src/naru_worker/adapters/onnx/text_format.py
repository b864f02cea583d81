"""The text format of protocol buffers as plain values, without their definition: enough to read a config.pbtxt.

Every field is a list, as the format lets any repeat. Names of enums come as `Word`. Called by `model_config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from naru_proto.errors import LoadError

MAX_DEPTH = 32
MAX_TOKENS = 200_000
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?[fF]?))"""
    r"""|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)|(?P<mark>[{}<>\[\]:,;])"""
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|([0-7]{1,3})|(.))", re.S)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_CLOSING = {"{": "}", "<": ">"}


class Word(str):
    """A bare word: true, false, or the name of an enum's value."""

    __slots__ = ()


Value: TypeAlias = "str | int | float | dict[str, list[Value]]"
Message: TypeAlias = dict[str, list[Value]]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def parse_text_format(text: str, where: str) -> Message:
    """Fields by name.

    Raises:
        LoadError: the text is no such message; names the line.
    """
    reader = _Reader(list(_tokens(text, where)), where)
    return reader.message("", 0)


def _tokens(text: str, where: str) -> Iterator[_Token]:
    place, line, count = 0, 1, 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        count += 1
        if match is None or count > MAX_TOKENS:
            why = "too many words" if match is not None else f"{text[place : place + 16]!r} cannot stand there"
            raise LoadError(f"{where}: line {line}: {why}")
        kind, found = str(match.lastgroup), match.group()
        if kind != "space":
            yield _Token(kind, found, line)
        line += found.count("\n")
        place = match.end()
    yield _Token("end", "", line)


class _Reader:
    def __init__(self, tokens: list[_Token], where: str) -> None:
        self._tokens = tokens
        self._where = where
        self._place = 0

    def message(self, closing: str, depth: int) -> Message:
        """Fields up to `closing`; up to the end of the text where that is empty."""
        if depth > MAX_DEPTH:
            raise self._wrong(f"nests deeper than {MAX_DEPTH}")
        fields: Message = {}
        while True:
            token = self._take()
            if token.kind == ("mark" if closing else "end") and token.text == closing:
                return fields
            if token.kind != "word":
                raise self._wrong(f"{token.text or 'the end'!r} stands where a field's name is needed", token)
            fields.setdefault(token.text, []).extend(self._values(depth))
            if self._peek().text in (",", ";") and self._peek().kind == "mark":
                self._take()

    def _values(self, depth: int) -> list[Value]:
        has_colon = self._peek().text == ":" and self._peek().kind == "mark"
        if has_colon:
            self._take()
        if self._peek().text == "[" and self._peek().kind == "mark":
            self._take()
            return self._list(depth, is_message_needed=not has_colon)
        return [self._value(depth, is_message_needed=not has_colon)]

    def _list(self, depth: int, *, is_message_needed: bool) -> list[Value]:
        values: list[Value] = []
        while True:
            token = self._peek()
            if token.text == "]" and token.kind == "mark":
                self._take()
                return values
            if values:
                comma = self._take()
                if comma.text != "," or comma.kind != "mark":
                    raise self._wrong(f"{comma.text!r} stands where a comma is needed", comma)
            values.append(self._value(depth, is_message_needed=is_message_needed))

    def _value(self, depth: int, *, is_message_needed: bool) -> Value:
        token = self._take()
        if token.kind == "mark" and token.text in _CLOSING:
            return self.message(_CLOSING[token.text], depth + 1)
        if is_message_needed or token.kind in ("mark", "end"):
            raise self._wrong(f"{token.text or 'the end'!r} stands where a value is needed", token)
        if token.kind == "text":
            parts = [_unescaped(token.text)]
            while self._peek().kind == "text":
                parts.append(_unescaped(self._take().text))
            return "".join(parts)
        return Word(token.text) if token.kind == "word" else self._number(token)

    def _number(self, token: _Token) -> int | float:
        try:
            return int(token.text, 0)
        except ValueError:
            pass
        try:
            return float(token.text.rstrip("fF"))
        except ValueError:
            raise self._wrong(f"{token.text!r} is no number", token) from None

    def _peek(self) -> _Token:
        return self._tokens[self._place]

    def _take(self) -> _Token:
        token = self._tokens[self._place]
        # The end is there for as long as it is asked for.
        self._place = min(self._place + 1, len(self._tokens) - 1)
        return token

    def _wrong(self, why: str, token: _Token | None = None) -> LoadError:
        return LoadError(f"{self._where}: line {(token or self._peek()).line}: {why}")


def _unescaped(quoted: str) -> str:
    def plain(match: re.Match[str]) -> str:
        if match[1]:
            return chr(int(match[1], 16))
        return chr(int(match[2], 8)) if match[2] else _LETTERS.get(match[3], match[3])

    return _ESCAPE.sub(plain, quoted[1:-1])
