"""Where marks may begin in text that comes in pieces, and which blanks belong to them. Used by readers of output."""

from __future__ import annotations

MAX_BLANKS = 64
"""Blanks right before a mark belong to it, up to so many: more are text."""
BLANKS = " \t\r\n"


def mark_begin(text: str, mark: str) -> int:
    """Where the longest end of the text begins that a mark begins with; its length: there is none."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0:
        if mark.startswith(text[at:]):
            return at
        at = text.find(mark[0], at + 1)
    return len(text)


def without_blanks(text: str, end: int) -> int:
    """The end before the blanks that stand there."""
    first = max(0, end - MAX_BLANKS)
    while end > first and text[end - 1] in BLANKS:
        end -= 1
    return end
