"""Reads one call that is no JSON: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, or `name(key=value)`.

Used by the readers of model output. What comes out are JSON arguments: values are typed by the tool's schema, or are
Python literals.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping

from naru_router.core.tools.declared import Tool
from naru_router.core.tools.json_calls import CallSink

FUNCTION_MARK = "<function="
_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_TAGS = (_PARAMETER, _FUNCTION_END)
MAX_NAME_CHARS = 256
MAX_PYTHON_CHARS = 64 * 1024
"""Longer calls are given as text: taking them apart would need too much at once."""


class TaggedCall:
    """`<function=…>`, a parameter at a time."""

    def __init__(self, sink: CallSink, tools: Mapping[str, Tool]) -> None:
        self.is_certain = False
        self.has_failed = False
        self._sink = sink
        self._tools = tools
        self._properties: Mapping[str, object] = {}
        self._rest = ""
        self._searched = 0
        """So many characters of the rest hold no end of the value."""
        self._key: str | None = None
        self._keys: set[str] = set()

    def feed(self, text: str) -> str | None:
        """Takes more; see CallBody."""
        self._rest += text
        if not self.is_certain and not self._read_head():
            return "" if self.has_failed else None
        while True:
            if self._key is None:
                end = self._read_tag()
                if end is not None:
                    return end
                if self._key is None:
                    return None
            elif not self._read_value():
                return None

    def finish(self) -> None:
        """A parameter that was cut is given as far as it came."""
        if self._key is not None:
            self._give(self._key, self._rest)

    def _read_head(self) -> bool:
        """Whether the name is known."""
        end = self._rest.find(">")
        if end < 0 or end > MAX_NAME_CHARS:
            self.has_failed = len(self._rest) > MAX_NAME_CHARS
            return False
        name = self._rest[len(FUNCTION_MARK) : end].strip()
        if not self._rest.startswith(FUNCTION_MARK) or not name:
            self.has_failed = True
            return False
        self._rest = self._rest[end + 1 :]
        self.is_certain = True
        self._sink.open(name)
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool is not None and tool.parameters else None
        self._properties = properties if isinstance(properties, dict) else {}
        return True

    def _read_tag(self) -> str | None:
        """What comes after the call, where it has ended."""
        rest = self._rest = self._rest.lstrip()
        if rest.startswith(_FUNCTION_END):
            return self._close(rest[len(_FUNCTION_END) :])
        if rest.startswith(_PARAMETER):
            end = rest.find(">")
            if end < 0 and len(rest) <= MAX_NAME_CHARS:
                return None
            if 0 <= end <= MAX_NAME_CHARS:
                self._key, self._rest, self._searched = rest[len(_PARAMETER) : end].strip(), rest[end + 1 :], 0
                return None
        elif not rest or any(tag.startswith(rest) for tag in _TAGS):
            return None
        return self._close(rest)  # neither of them: the call is over, and this is something else

    def _close(self, rest: str) -> str:
        self._sink.arguments("}" if self._keys else "{}")
        return rest

    def _read_value(self) -> bool:
        """Whether the value is complete."""
        end = self._rest.find(_PARAMETER_END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._rest) - len(_PARAMETER_END))
            return False
        assert self._key is not None
        self._give(self._key, self._rest[:end])
        self._key, self._rest = None, self._rest[end + len(_PARAMETER_END) :]
        return True

    def _give(self, key: str, raw: str) -> None:
        if key in self._keys:
            return
        text = raw.removeprefix("\n").removesuffix("\n")
        head = ", " if self._keys else "{"
        self._keys.add(key)
        value = _typed(text, self._properties.get(key))
        self._sink.arguments(f"{head}{json.dumps(key, ensure_ascii=False)}: {value}")


def _typed(text: str, schema: object) -> str:
    """A parameter's text as JSON: by its type where the schema has one, else as what it reads as."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "string":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            if _is_finite(text) and not (isinstance(kind, list) and "string" in kind and isinstance(value, str)):
                return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _is_finite(text: str) -> bool:
    return text.strip() not in ("NaN", "Infinity", "-Infinity")


_JSON_NAMES = {"true": True, "false": False, "null": None}
_CALL_HEAD = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]{0,127})\(")


class PythonCall:
    """`name(key=value, …)` with Python literals; given whole, as its arguments mean nothing before their end."""

    def __init__(self, sink: CallSink) -> None:
        self.is_certain = False
        self.has_failed = False
        self._sink = sink
        self._rest = ""
        self._at = 0
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> str | None:
        """Takes more; see CallBody."""
        self._rest += text
        end = self._find_end()
        if end < 0:
            self.has_failed = len(self._rest) > MAX_PYTHON_CHARS
            return "" if self.has_failed else None
        parsed = _python_arguments(self._rest[:end])
        if parsed is None:
            self.has_failed = True
            return ""
        self.is_certain = True
        self._sink.open(parsed[0])
        self._sink.arguments(parsed[1])
        return self._rest[end:]

    def finish(self) -> None:
        """Nothing is withheld of a call that was opened."""

    def _find_end(self) -> int:
        """One past the closing parenthesis; -1: it is not here."""
        while self._at < len(self._rest):
            char = self._rest[self._at]
            self._at += 1
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return self._at
        return -1


class _JsonNames(ast.NodeTransformer):
    """JSON's words for what Python writes otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _python_arguments(text: str) -> tuple[str, str] | None:
    """(name, JSON arguments); None: it is no such call."""
    match = _CALL_HEAD.match(text)
    if match is None or len(text) > MAX_PYTHON_CHARS:
        return None
    try:
        tree = ast.parse("_" + text[match.end() - 1 :].strip(), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not isinstance(tree.func, ast.Name):
            return None
        values = {}
        for keyword in tree.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
        return match.group(1), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
