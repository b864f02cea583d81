"""Finds the ends of JSON values in text that comes in pieces. Used by the readers of calls; nothing is parsed here."""

from __future__ import annotations

import re

_IN_TEXT = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class ValueScanner:
    """Finds the end of a JSON value in text that comes in pieces."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "kind")

    def __init__(self, first: str) -> None:
        """`first`: the value's first character, which is not to be fed before `feed` gets it."""
        self.kind = first if first in '{["' else "scalar"
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str, at: int) -> int:
        """One past the end of the value; -1: it does not end in this text."""
        if self.kind == "scalar":
            match = _SCALAR_END.search(text, at)
            return match.start() if match else -1
        length = len(text)
        while at < length:
            if self._in_string:
                at = self._skip_string(text, at)
                if at < 0:
                    return -1
                if self._depth == 0:
                    return at
                continue
            match = _OUTSIDE.search(text, at)
            if match is None:
                return -1
            at = match.end()
            char = match.group()
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return -1

    def _skip_string(self, text: str, at: int) -> int:
        """One past the closing quote; -1: it is not here."""
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        while True:
            match = _IN_TEXT.search(text, at)
            if match is None:
                return -1
            at = match.end()
            if match.group() == '"':
                self._in_string = False
                return at
            if at >= len(text):
                self._is_escaped = True
                return -1
            at += 1
