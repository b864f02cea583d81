"""Grammars that hold models to calls: each takes what it should and nothing else, and readers understand it."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from naru_proto.v1.inference_pb2 import Choices, StructuredOutput
from naru_router.core.chat_answer import read_message
from naru_router.core.tools import grammar
from naru_router.core.tools.declared import Tool
from naru_router.core.tools.grammar import Thinking
from naru_router.core.tools.reader import StyledReader
from naru_router.core.tools.styles import Style, style_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "w": {"$ref": "#/$defs/w"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"w": {"enum": ["x", 'y"/']}},
}
TOOLS = [Tool("f", parameters=SCHEMA), Tool("g-2")]
BYTES = LLTokenizer("byte")
HERMES = style_of("{{ tools }}<tool_call><think>")
XML = style_of("{{ tools }}<tool_call><function=")
LLAMA = style_of("{{ tools }}<|start_header_id|>parameters")
PYTHONIC = style_of("{{ tools }}<|header_start|>")
MISTRAL = style_of("[TOOL_CALLS]")
NAMED = style_of("[TOOL_CALLS][ARGS]")
LISTED = style_of("{{ tools }}<|tool_call|><|/tool_call|>")
TAGGED = style_of("{{ tools }}<TOOLCALL>")
GENERIC = style_of("")
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g-2", "arguments": {}}\n</tool_call>'


def takes(lark: str, text: str) -> bool:
    """Whether the whole text is one that the grammar describes."""
    matcher = LLMatcher(BYTES, lark)
    assert not matcher.get_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


CALLS: list[tuple[Style, str, int]] = [
    (HERMES, f"{F}\n{G}", 2),
    (HERMES, F.replace('{"a": 1}', '{"a":1}'), 1),
    (GENERIC, f"{G}\n{G}", 2),
    (XML, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=w>\n\"x\"\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=g-2>\n</function>\n</tool_call>", 2),
    (XML, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n<b>\n\n</parameter>\n</function>\n"
        "</tool_call>", 1),
    (LLAMA, '{"name": "f", "parameters": {"a": 1, "w": "y\\"/"}}; {"name": "g-2", "parameters": {}}', 2),
    (PYTHONIC, '[f(a=1), f(a=-2, w="x")]', 2),
    (MISTRAL, '[{"name": "f", "arguments": {"a": 1}}, {"name": "g-2", "arguments": {}}]', 2),
    (TAGGED, '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g-2", "arguments": {}}]</TOOLCALL>', 2),
    (LISTED, '[{"name": "g-2", "arguments": {}}]', 1),
    (NAMED, 'f{"a": 1}', 1),
]  # fmt: skip
NO_CALLS: list[tuple[Style, str]] = [
    (HERMES, "hello"),
    (HERMES, ""),
    (HERMES, F.replace("1", '"1"')),
    (HERMES, F.replace('"f"', '"h"')),
    (HERMES, F.replace("{}", '{"x": 1}').replace('{"a": 1}', "{}")),
    (HERMES, f"{F}\nand more"),
    (HERMES, F.replace('{"a": 1}', '{"a":  1}')),
    (HERMES, F.replace('{"a": 1}', '{"a": 1\n}')),
    (XML, "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    (LLAMA, '{"name": "f", "parameters": {"a": 1, "b": 2}}'),
    (PYTHONIC, "[f()]"),
    (MISTRAL, "[]"),
    (NAMED, 'h{"a": 1}'),
]


@pytest.mark.parametrize(("style", "text", "count"), CALLS)
def test_calls_as_models_write_them_are_taken_and_read(style: Style, text: str, count: int) -> None:
    lark = grammar.calls_grammar(style, TOOLS, is_parallel=True, thinking="never")
    assert takes(lark, text)
    numbers = iter(range(9))
    primer = grammar.forced_opening(style, TOOLS)
    message, _ = read_message(
        text,
        "stop",
        lambda: StyledReader(style, lambda: f"c{next(numbers)}", tools={t.name: t for t in TOOLS}, primer=primer),
    )
    calls: Any = message["tool_calls"]
    assert len(calls) == count and message["content"] is None
    one = grammar.calls_grammar(style, TOOLS, is_parallel=False, thinking="never")
    assert takes(one, text) == (count == 1)


@pytest.mark.parametrize(("style", "text"), NO_CALLS)
def test_what_is_no_call_of_these_tools_is_not_taken(style: Style, text: str) -> None:
    assert not takes(grammar.calls_grammar(style, TOOLS, is_parallel=True, thinking="never"), text)


def test_any_optional_argument_may_be_the_first_one() -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    lark = grammar.calls_grammar(PYTHONIC, [tool], is_parallel=True, thinking="never")
    for arguments in ("", "a=null", "b=null", "a=null, b=null"):
        assert takes(lark, f"[f({arguments})]")
    assert not takes(lark, "[f(, b=null)]")


def test_one_named_tool_of_a_style_that_writes_its_name_first_leaves_its_arguments() -> None:
    assert grammar.forced_opening(NAMED, TOOLS[:1]) == "[TOOL_CALLS]f[ARGS]"
    lark = grammar.calls_grammar(NAMED, TOOLS[:1], is_parallel=False, thinking="never")
    assert takes(lark, '{"a": 3}') and not takes(lark, 'f{"a": 3}')


@pytest.mark.parametrize("thinking", ["never", "maybe", "open"])
def test_reasoning_may_come_first_where_it_may_come(thinking: Thinking) -> None:
    lark = grammar.calls_grammar(HERMES, TOOLS, is_parallel=True, thinking=thinking)
    assert takes(lark, F) == (thinking != "open")
    assert takes(lark, f"<think>\nhm </thi\n</think>\n\n{F}") == (thinking != "never")
    assert takes(lark, f"hm </think>{F}") == (thinking == "open")


def test_text_is_free_and_calls_in_it_fit_where_all_tools_are_strict() -> None:
    lark = grammar.free_calls_grammar(HERMES, TOOLS, is_parallel=True, thinking="maybe")
    assert lark is not None
    for text in ("", "Hello <tool> you\n", F, f"Look: {F}\n{G}\nDone.", f"<think>x</think>{F}"):
        assert takes(lark, text), text
    for text in (F.replace("1", "true"), f"{G}{F.replace('f', 'h', 1)}", "<tool_call>x"):
        assert not takes(lark, text), text
    one = grammar.free_calls_grammar(HERMES, TOOLS, is_parallel=False, thinking="never")
    assert one is not None and takes(one, f"Look: {F}") and takes(one, "no") and not takes(one, f"{F}\n{G}")
    assert grammar.free_calls_grammar(MISTRAL, TOOLS, is_parallel=True, thinking="never") is None


ANSWERS: list[tuple[StructuredOutput, str, str]] = [
    (StructuredOutput(json_schema='{"type": "object", "required": ["z"], "properties": {"z": {"type": "null"}}}'),
        '{"z": null}', '{"z": 1}'),
    (StructuredOutput(json_object=True), '{"a": [1]}', "[1]"),
    (StructuredOutput(choice=Choices(texts=["a", 'b"č\n/'])), 'b"č\n/', "b"),
    (StructuredOutput(regex=r"a/\/[/\d]b"), "a//7b", "a//ab"),
    (StructuredOutput(grammar='start: x "!"\nx: "q"'), "q!", "q"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS)
def test_an_answer_has_its_form_after_the_reasoning(answer: StructuredOutput, good: str, bad: str) -> None:
    opened = grammar.answer_grammar(HERMES, answer, thinking="open")
    assert takes(opened, f"I think\n</think>\n\n{good}")
    assert not takes(opened, f"I think\n</think>\n\n{bad}") and not takes(opened, good)
    either = grammar.answer_grammar(HERMES, answer, thinking="maybe")
    assert takes(either, f"<think>x</think>{good}") and takes(either, good) and not takes(either, bad)


def test_calls_or_an_answer_of_a_form() -> None:
    answer = ANSWERS[0][0]
    lark = grammar.calls_or_answer_grammar(HERMES, TOOLS, answer, is_parallel=True, thinking="maybe")
    assert lark is not None
    assert takes(lark, F) and takes(lark, '{"z": null}') and takes(lark, '<think>x</think>{"z": null}')
    assert not takes(lark, "free text") and not takes(lark, f'{F}{{"z": null}}')
    for style, other in ((LLAMA, answer), (MISTRAL, answer), (HERMES, ANSWERS[2][0])):
        assert grammar.calls_or_answer_grammar(style, TOOLS, other, is_parallel=True, thinking="never") is None


def test_what_schemas_say_to_people_is_left_out_and_nothing_else() -> None:
    schema: dict[str, Any] = {
        "title": "T",
        "type": "object",
        "properties": {"title": {"description": "D", "const": {"title": 1}}, "description": {"type": "null"}},
        "required": ["title", "description"],
        "additionalProperties": False,
    }
    lark = grammar.calls_grammar(LLAMA, [Tool("f", parameters=schema)], is_parallel=False, thinking="never")
    assert '"T"' not in lark and '"D"' not in lark
    assert takes(lark, '{"name": "f", "parameters": {"title": {"title": 1}, "description": null}}')
    assert not takes(lark, '{"name": "f", "parameters": {"title": 1, "description": null}}')
