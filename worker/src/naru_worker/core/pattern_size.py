"""How large a regular expression is with its counted repetitions written out: what nested ones cost, told beforehand.
And where such expressions stand in a JSON Schema and in a Lark grammar.

Used by the grammar compiler, before the grammar library looks at a pattern. An estimate: it reads just enough of the
syntax to multiply what `{m,n}` repeats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_COUNT = re.compile(r"\{(\d{1,9})?(?:,(\d{0,9}))?\}")
_CODE = re.compile(r"\\[pPxuU]\{[^}]*\}")
_LARK_PART = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?'
    r"|//[^\n]*|\#[^\n]*"
    r"|/(?P<pattern>(?:\\.|[^/\\])++)(?:/|\\?\Z)"
    r"|%json\s*(?P<schema>)",
    re.DOTALL,
)
"""Of a grammar: a text, a remark, a pattern, or what a schema follows. What is none of these has no pattern. What is
opened and not closed is taken to its end, so that nothing is read twice."""
_JSON = json.JSONDecoder()
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


def patterns_of_lark(lark: str) -> Iterator[str]:
    """All patterns of a Lark grammar: those between slashes, and those of the schemas that stand in it.

    Raises:
        RecursionError: a schema is nested too deeply.
    """
    place = 0
    while (part := _LARK_PART.search(lark, place)) is not None:
        place = part.end()
        if part["pattern"] is not None:
            yield part["pattern"]
        elif part["schema"] is not None:
            try:
                schema, place = _JSON.raw_decode(lark, place)
            except ValueError:
                continue  # for the library to refuse
            yield from patterns_of_schema(schema)


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
