"""How large a regular expression is with its counted repetitions written out: what nested ones cost, told beforehand.

Used by the grammar compiler, before the grammar library looks at a pattern. An estimate: it reads just enough of the
syntax to multiply what `{m,n}` repeats.
"""

from __future__ import annotations

import re
from typing import Any

_COUNT = re.compile(r"\{(\d{1,9})?(?:,(\d{0,9}))?\}")
_CODE = re.compile(r"\\[pPxuU]\{[^}]*\}")
_MOST = 10**12


def pattern_size(pattern: str) -> int:
    """Characters and classes of the pattern, each as often as it is repeated by a count; at most 10**12."""
    sizes, last, place = [0], 0, 0
    while place < len(pattern):
        char, start = pattern[place], place
        place += 1
        if char == "(":
            sizes.append(0)
            continue
        if char == ")":
            last = sizes.pop() if len(sizes) > 1 else 0
        elif char == "{" and (count := _COUNT.match(pattern, start)) is not None:
            place = count.end()
            more = last * max(0, _times(count) - 1)
            sizes[-1], last = min(_MOST, sizes[-1] + more), min(_MOST, last + more)
            continue
        elif char in "*+?|":
            continue
        else:
            last, place = 1, _end_of_atom(pattern, start)
        sizes[-1] = min(_MOST, sizes[-1] + last)
    return min(_MOST, sum(sizes))


def patterns_of_schema(schema: Any) -> list[str]:
    """All patterns in a JSON Schema, wherever they stand; what is no pattern but looks like one counts, too."""
    found: list[str] = []
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            left += item.values()
            if isinstance(item.get("pattern"), str):
                found.append(item["pattern"])
            if isinstance(item.get("patternProperties"), dict):
                found += item["patternProperties"]
    return found


def _times(count: re.Match[str]) -> int:
    return max(int(count.group(1) or 0), int(count.group(2) or 0))


def _end_of_atom(pattern: str, start: int) -> int:
    """Where the character, the escape or the class at `start` is over."""
    if pattern[start] == "\\":
        code = _CODE.match(pattern, start)
        return code.end() if code is not None else start + 2
    if pattern[start] != "[":
        return start + 1
    depth, place = 0, start
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 1
        elif char == "[":
            depth += 1
        elif char == "]" and place > start + 1:
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return len(pattern)
