"""Grammars that hold a model to calls of tools, or to an answer after its reasoning: Lark, in llguidance's dialect.

Made by the planner of chats; compiled and kept by the worker. A call is written as the style's models write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from naru_proto.v1.inference_pb2 import StructuredOutput
from naru_router.core.tools.channels import call_head
from naru_router.core.tools.declared import Tool
from naru_router.core.tools.styles import Style

Thinking = Literal["never", "maybe", "open"]
"""Whether the model may think before it answers; open: the prompt ends in the middle of it."""
_NO_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
}
_REMARKS = frozenset({"title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly"})
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose keys are names, not keywords."""
_OF_VALUES = frozenset({"const", "enum"})
_TEXT = r"/(.|\n)*/"
_BLANKS = r"/[ \n]*/"


def calls_grammar(style: Style, tools: Sequence[Tool], *, is_parallel: bool, thinking: Thinking) -> str:
    """One call or more, and nothing else but reasoning before them. What opens the first one may be in the prompt."""
    rules = [*_call_rules(style, tools, is_parallel=is_parallel), *_thinking_rules(style, thinking)]
    return "\n".join([f"start: {_head(thinking)} {'calls' if _has_textual_marks(style) else 'opened'}", *rules]) + "\n"


def free_calls_grammar(style: Style, tools: Sequence[Tool], *, is_parallel: bool, thinking: Thinking) -> str | None:
    """Text in which calls, where there are any, fit their schemas; None: this style's cannot be told from text."""
    if not _has_textual_marks(style):
        return None
    mark = json.dumps(style.call_marks[0])
    rules = [
        f"TEXT: {_TEXT}",
        f"opening[lazy]: TEXT {mark}",
        "part: opening called",
        *_call_rules(style, tools, is_parallel=is_parallel),
        *_thinking_rules(style, thinking),
    ]
    body = "part* TEXT" if is_parallel else "(part | TEXT)"
    return "\n".join([f"start: {_head(thinking)} {body}", *rules]) + "\n"


def calls_or_answer_grammar(
    style: Style, tools: Sequence[Tool], answer: StructuredOutput, *, is_parallel: bool, thinking: Thinking
) -> str | None:
    """Calls, or an answer of the given form; None: the two cannot be told apart."""
    is_json = answer.WhichOneof("kind") in ("json_schema", "json_object")
    if not _has_textual_marks(style) or not is_json:
        return None
    rules = [
        f"answer: {_answer(answer)}",
        *_call_rules(style, tools, is_parallel=is_parallel),
        *_thinking_rules(style, thinking),
    ]
    return "\n".join([f"start: {_head(thinking)} (calls | answer)", *rules]) + "\n"


def answer_grammar(style: Style, answer: StructuredOutput, *, thinking: Thinking) -> str:
    """An answer of the given form, after reasoning."""
    rules = [f"answer: {_answer(answer)}", *_thinking_rules(style, thinking)]
    return "\n".join([f"start: {_head(thinking)} answer", *rules]) + "\n"


def forced_opening(style: Style, tools: Sequence[Tool]) -> str:
    """What the prompt ends with where calls are required: marks that are special tokens, which no grammar can name."""
    if not _is_opened_by_prompt(style):
        return ""
    if style.name == "mistral_named" and len(tools) == 1:
        return f"{style.call_marks[0]}{tools[0].name}[ARGS]"
    return style.call_marks[0]


def channel_opening(tools: Sequence[Tool]) -> str:
    """What the prompt of a model that speaks on channels ends with where a call is required."""
    return call_head(tools[0].name) if len(tools) == 1 else call_head("").partition(" <|constrain|>")[0]


def channel_grammar(tools: Sequence[Tool]) -> str:
    """The rest of one call on a channel."""
    if len(tools) == 1:
        return f"start: {_arguments(tools[0])}\n"
    rules = [f"start: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        name = json.dumps(f"{tool.name} ")
        rules.append(f'call_{index}: {name} <|constrain|> "json" <|message|> {_arguments(tool)}')
    return "\n".join(rules) + "\n"


def _is_opened_by_prompt(style: Style) -> bool:
    return style.are_marks_special and not style.takes_bare_json and style.name != "pythonic"


def _head(thinking: Thinking) -> str:
    return {"never": "", "maybe": "thinking?", "open": "thought"}[thinking]


def _thinking_rules(style: Style, thinking: Thinking) -> list[str]:
    if thinking == "never" or style.reasoning is None:
        return []
    begin, end = style.reasoning
    end_text = re.escape(end).replace("/", r"\/")
    rules = ["thought: thought_end BLANKS", rf"thought_end[lazy]: /(?s:.*){end_text}/", f"BLANKS: {_BLANKS}"]
    if thinking == "maybe":
        rules.append(f"thinking: {json.dumps(begin)} thought")
    return rules


def _answer(answer: StructuredOutput) -> str:
    kind = answer.WhichOneof("kind")
    if kind == "json_schema":
        return _json(json.loads(answer.json_schema))
    if kind == "json_object":
        return _json({"type": "object"})
    if kind == "choice":
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in answer.choice.texts)
    if kind == "regex":
        return f"/{_slashed(answer.regex)}/"
    return f"%lark {{\n{answer.grammar}\n}}"


def _slashed(regex: str) -> str:
    """A regular expression between slashes: its own are escaped, and it stays on one line."""
    escaped = re.sub(r"(\\.)|/", lambda match: match.group(1) or r"\/", regex, flags=re.DOTALL)
    return escaped.replace("\n", r"\n")


def _has_textual_marks(style: Style) -> bool:
    """They are plain text, which a grammar can name."""
    return bool(style.call_close) and not style.are_marks_special


def _call_rules(style: Style, tools: Sequence[Tool], *, is_parallel: bool) -> list[str]:
    """Rules `calls` (with their marks), `called` (one mark's, after it), `opened` (all, where no mark is written)."""
    if style.name == "mistral_named" and len(tools) == 1:
        return [f"opened: {_arguments(tools[0])}"]  # the prompt has its name
    rules = [f"one: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        rules += _rules_of_tool(style, index, tool)
    if style.is_list:
        more = '(", " one)*' if is_parallel else ""
        rules.append(f'list: "[" one {more} "]"')
    inner = "list" if style.is_list else "one"
    if _has_textual_marks(style):
        blank = "" if style.is_list else "\n"
        mark, close = json.dumps(style.call_marks[0]), json.dumps(blank + style.call_close)
        more = r'("\n" call)*' if is_parallel and not style.is_list else ""
        return [*rules, f"called: {json.dumps(blank)} {inner} {close}", f"call: {mark} called", f"calls: call {more}"]
    more = '("; " one)*' if is_parallel and style.name == "llama" else ""
    return [*rules, f"opened: {inner} {more}"]


def _rules_of_tool(style: Style, index: int, tool: Tool) -> list[str]:
    arguments = f"arguments_{index}: {_arguments(tool)}"
    if style.name == "mistral_named":
        return [f"call_{index}: {json.dumps(tool.name)} arguments_{index}", arguments]
    if style.name == "xml":
        return _tagged_rules(index, tool)
    if style.name == "pythonic":
        return _python_rules(index, tool)
    head = f'{{"name": "{tool.name}", "{style.arguments_key}": '
    return [f'call_{index}: {json.dumps(head)} arguments_{index} "}}"', arguments]


def _arguments(tool: Tool) -> str:
    return _json(_NO_ARGUMENTS if tool.parameters is None else tool.parameters)


def _json(schema: Mapping[str, object]) -> str:
    """JSON that fits a schema, with one blank between its parts or none, and never more: models may not end them."""
    told = _without_remarks(schema)
    assert isinstance(told, dict)  # as the schema is
    return f"%json {json.dumps({**told, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"


def _without_remarks(schema: object) -> object:
    """A schema without what is for people: much of its text, and none of its meaning."""
    if isinstance(schema, list):
        return [_without_remarks(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    told: dict[str, object] = {}
    for key, value in schema.items():
        if key in _REMARKS:
            continue
        if key in _OF_NAMES and isinstance(value, dict):
            told[key] = {name: _without_remarks(each) for name, each in value.items()}
        else:
            told[key] = value if key in _OF_VALUES else _without_remarks(value)
    return told


def _properties(tool: Tool) -> tuple[dict[str, object], list[object]]:
    schema = tool.parameters or {}
    properties, required = schema.get("properties"), schema.get("required")
    return (properties if isinstance(properties, dict) else {}), (required if isinstance(required, list) else [])


def _tagged_rules(index: int, tool: Tool) -> list[str]:
    """Parameters in their order; texts are free, all else fits its schema."""
    properties, required = _properties(tool)
    rules, parts = [], []
    for number, (key, schema) in enumerate(properties.items()):
        rule = f"parameter_{index}_{number}"
        begin = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        is_text = not isinstance(schema, dict) or schema.get("type") in (None, "string")
        if is_text:
            rules += [f"{rule}: {begin} {rule}_text", rf"{rule}_text[lazy]: /(?s:.*)\n<\/parameter>\n/"]
        else:
            rules += [f'{rule}: {begin} {rule}_value "\\n</parameter>\\n"', f"{rule}_value: {_json_of(tool, schema)}"]
        parts.append(rule if key in required else f"{rule}?")
    head = json.dumps(f"<function={tool.name}>\n")
    return [f'call_{index}: {head} {" ".join(parts)} "</function>"', *rules]


def _python_rules(index: int, tool: Tool) -> list[str]:
    """Required keys in their order, then optional ones; values are JSON, which the readers take for Python."""
    properties, required = _properties(tool)
    keys = [key for key in properties if key in required] + [key for key in properties if key not in required]
    num_required = sum(key in required for key in keys)
    rules = []
    for number, key in enumerate(keys):
        begin = json.dumps(f"{key}=", ensure_ascii=False)
        rules.append(f"argument_{index}_{number}: {begin} {_json_of(tool, properties[key])}")
    parts = [f"argument_{index}_{number}" for number in range(len(keys))]
    optional = [f'(", " {part})?' for part in parts[num_required:]]
    if num_required:
        body = ' ", " '.join(parts[:num_required]) + " " + " ".join(optional)
    else:  # any of them may be the first
        firsts = [" ".join([part, *optional[number + 1 :]]) for number, part in enumerate(parts)]
        body = f"({' | '.join(firsts)})?" if firsts else ""
    return [f'call_{index}: {json.dumps(tool.name + "(")} {body} ")"', *rules]


def _json_of(tool: Tool, schema: object) -> str:
    """A part of a tool's schema, with the definitions that it may lead to."""
    if isinstance(schema, dict) and tool.parameters is not None:
        shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        schema = {**schema, **shared}
    return _json(schema) if isinstance(schema, dict) else _json({})
