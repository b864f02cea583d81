"""What models write: text, reasoning and calls of tools, the same however it is cut, and never lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naru_router.core.chat_parts import OutputReader, Part, ReasoningPart, TextPart, ToolCallPart
from naru_router.core.tools.channels import ChannelReader, call_head
from naru_router.core.tools.declared import Tool
from naru_router.core.tools.marks import MAX_BLANKS
from naru_router.core.tools.reader import StyledReader
from naru_router.core.tools.styles import Style, style_of

THINK = "{{ '<think>' }}"
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{% endif %}" + THINK,
    "xml": "{% if tools %}<tool_call><function=f>{% endif %}",
    "llama": "<|start_header_id|>{% if tools %}{'name': 'x', 'parameters': {}}{% endif %}",
    "pythonic": "<|header_start|>{% if tools %}[f(a=1)]{% endif %}",
    "mistral": "[AVAILABLE_TOOLS][TOOL_CALLS]",
    "mistral_named": "[TOOL_CALLS]f[ARGS][THINK]",
    "listed": "{{ tools }}<|tool_call|>[]<|/tool_call|>",
    "tagged_list": "{{ tools }}<TOOLCALL>",
    "generic": "{{ messages }}",
    "channels": "<|channel|>final<|message|>{{ messages }}",
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = {"f": Tool("f", parameters=PARAMETERS), "g": Tool("g")}
Make = Callable[..., OutputReader]


def new_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def reader(style: Style, *, tools: dict[str, Tool] | None = TOOLS, **options: Any) -> OutputReader:
    if style.name == "channels":
        return ChannelReader(new_ids(), takes_calls=tools is not None, **options)
    return StyledReader(style, new_ids(), tools=tools, **options)


def read(made: OutputReader, pieces: Sequence[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += made.feed(piece)
    return [*parts, *made.finish()]


def told(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, calls) of parts, whose form is checked."""
    texts, thoughts = "", ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            assert part.text
            texts += part.text
        elif isinstance(part, ReasoningPart):
            assert part.text
            thoughts += part.text
        elif isinstance(part, ToolCallPart) and part.call_id:
            assert part.index == len(calls) and part.name and not part.arguments
            ids.append(part.call_id)
            calls.append((part.name, ""))
        else:
            assert isinstance(part, ToolCallPart)
            assert part.index == len(calls) - 1 and part.arguments and not part.name
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    assert len(set(ids)) == len(ids)
    return texts, thoughts, calls


def whole(style: str, text: str, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    return told(read(reader(style_of(TEMPLATES[style]), **options), [text]))


def test_styles_are_known_by_their_templates() -> None:
    for name, template in TEMPLATES.items():
        assert style_of(template).name == name
    assert style_of(TEMPLATES["hermes"]).reasoning == ("<think>", "</think>")
    assert style_of(TEMPLATES["mistral_named"]).reasoning == ("[THINK]", "[/THINK]")
    assert style_of("{{ messages }} <tool_call>").is_told_by_us


HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "}\\"{"}}\n</tool_call>'
HERMES_G = '<tool_call>\n{"arguments": {}, "name": "g"}\n</tool_call>'
F_ARGUMENTS = '{"a": 1, "s": "}\\"{"}'
READ: list[tuple[str, str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("hermes", "Hello  there \n", ("Hello  there \n", "", [])),
    ("hermes", HERMES_F, ("", "", [("f", F_ARGUMENTS)])),
    ("hermes", f"Let me see.\n{HERMES_F}\n{HERMES_G}\n", ("Let me see.", "", [("f", F_ARGUMENTS), ("g", "{}")])),
    ("hermes", f"{HERMES_G} and {HERMES_G}", ("and", "", [("g", "{}"), ("g", "{}")])),
    ("hermes", f"<think>\nHm, <b>\n</think>\n\nSo:{HERMES_G}", ("So:", "Hm, <b>", [("g", "{}")])),
    ("hermes", "<think>cut", ("", "cut", [])),
    ("hermes", "a <think> b", ("a <think> b", "", [])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', ("", "", [("f", '{"a": 2}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>[{"name": "f", "parameters": {}}, {"name": "g"}]', ("", "", [("f", "{}"), ("g", "{}")])),
    ("hermes", '<tool_call>{"id": [1, {"x": "]"}], "name": "f", "arguments": {}}', ("", "", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', ("", "", [("f", '{"a": "cut')])),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', ("", "", [("nobody", "{}")])),
    # What is no call is text, whole.
    ("hermes", "<tool_call>\nnot JSON</tool_call>", ("<tool_call>\nnot JSON</tool_call>", "", [])),
    ("hermes", '<tool_call> {"name": 5, "arguments": {}}', ('<tool_call> {"name": 5, "arguments": {}}', "", [])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}', ('<tool_call>{"arguments": {"a": 1}}', "", [])),
    ("hermes", '<tool_call>{"name": "f', ('<tool_call>{"name": "f', "", [])),
    ("hermes", "<tool_call></tool_call>", ("<tool_call></tool_call>", "", [])),
    ("hermes", "a <tool_c", ("a <tool_c", "", [])),
    ("hermes", f"<tool_call>x{HERMES_G}", ("<tool_call>x", "", [("g", "{}")])),
    ("hermes", '{"name": "f", "arguments": {}}', ('{"name": "f", "arguments": {}}', "", [])),
    ("xml", "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n<parameter=s>\n<b>\n1\n</parameter>\n"
        "</function>\n</tool_call>", ("", "", [("f", '{"a": 3, "s": "<b>\\n1"}')])),
    ("xml", "<tool_call><function=g></function></tool_call>ok", ("ok", "", [("g", "{}")])),
    ("xml", "<tool_call><function=g><parameter=q>[1, true]</parameter><parameter=r>yes</parameter></function>",
        ("", "", [("g", '{"q": [1, true], "r": "yes"}')])),
    ("xml", "<tool_call><function=f><parameter=s>cut", ("", "", [("f", '{"s": "cut"')])),
    ("xml", HERMES_F, ("", "", [("f", F_ARGUMENTS)])),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    ("llama", '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ("", "", [("f", "{}"), ("g", "{}")])),
    ("llama", '{"name": "Ann", "parameters": {"age": 3}}', ('{"name": "Ann", "parameters": {"age": 3}}', "", [])),
    ("llama", '\n {"answer": 42}', ('\n {"answer": 42}', "", [])),
    ("llama", '<|python_tag|>print(1)', ("<|python_tag|>print(1)", "", [])),
    ("llama", 'Sure: {"name": "f", "parameters": {}}', ('Sure: {"name": "f", "parameters": {}}', "", [])),
    ("pythonic", '[f(a=1, s="x)"), g()]', ("", "", [("f", '{"a": 1, "s": "x)"}'), ("g", "{}")])),
    ("pythonic", "<|python_start|>[f(a=[true, null])]<|python_end|>", ("", "", [("f", '{"a": [true, null]}')])),
    ("pythonic", "[1, 2]", ("[1, 2]", "", [])),
    ("pythonic", "[f(1)]", ("[f(1)]", "", [])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", '{"a": [1]}'), ("g", "{}")])),
    ("mistral", 'Hi[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', ("Hi", "", [("f", "{}")])),
    ("mistral", "[TOOL_CALLS] nothing", ("[TOOL_CALLS] nothing", "", [])),
    ("mistral_named", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")])),
    ("mistral_named", '[THINK]hm[/THINK]\nok[TOOL_CALLS]f{"a": 1}', ("ok", "hm", [("f", '{"a": 1}')])),
    ("mistral_named", "[TOOL_CALLS]f[ARGS]", ("[TOOL_CALLS]f[ARGS]", "", [])),
    ("listed", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', ("", "", [("f", "{}")])),
    ("tagged_list", 'So: <TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        ("So:", "", [("f", "{}"), ("g", "{}")])),
    ("generic", HERMES_F, ("", "", [("f", F_ARGUMENTS)])),
    ("generic", '{"name": "g", "arguments": {"x": 1}}', ("", "", [("g", '{"x": 1}')])),
    ("generic", '{"name": "Ann"}', ('{"name": "Ann"}', "", [])),
    ("channels", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("Yes.", "hm", [])),
    ("channels", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "", [("f", '{"a": 1}')])),
    ("channels", '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}', ("", "", [("g", "{}")])),
    ("channels", "<|channel|>commentary<|message|>I look.<|end|>", ("I look.", "", [])),
    ("channels", "Just text <|x", ("Just text <|x", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "expected"), READ)
def test_what_is_written_is_told_apart(style: str, text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert whole(style, text) == expected
    assert told(read(reader(style_of(TEMPLATES[style])), list(text))) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
    "<|python_tag|>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<|tool_call|>", "<|/tool_call|>",
    "<TOOLCALL>", "</TOOLCALL>",
    '{"name": "f", ', '"arguments": ', '"parameters": {"a": 1}}', '{"a": "x\\"}"}', "}", "{", "[", "]", ",", ";", '"',
    "\\", "f", "g(", "a=1", ")", "\n", " ", "\t", "null", "čaj", "<", "hi", HERMES_F, ":",
    '{"name": "g", "arguments": {}}',
    "<|channel|>", "<|message|>", "<|end|>", "analysis", "final", " to=functions.f", "<|start|>assistant", "12",
]  # fmt: skip
WRITTEN = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


HEAD = call_head("f")


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(WRITTEN)
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize("style", TEMPLATES)
@settings(max_examples=250)
@given(case=cut_texts(), has_tools=st.booleans(), primer=st.sampled_from(["", "<think>", "[TOOL_CALLS]", HEAD]))
def test_any_cut_of_a_text_gives_the_same_parts(
    style: str, case: tuple[str, list[str]], has_tools: bool, primer: str
) -> None:
    text, pieces = case
    options: dict[str, Any] = {"tools": TOOLS if has_tools else None, "primer": primer}
    known = style_of(TEMPLATES[style])
    expected = told(read(reader(known, **options), [text]))
    assert told(read(reader(known, **options), pieces)) == expected
    assert told(read(reader(known, **options), list(text))) == expected


@pytest.mark.parametrize("style", [name for name in TEMPLATES if name != "channels"])
@settings(max_examples=150)
@given(text=WRITTEN)
def test_without_calls_and_reasoning_no_character_is_lost(style: str, text: str) -> None:
    texts, thoughts, calls = whole(style, text)
    if not calls and not thoughts and "<think>" not in text and "[THINK]" not in text:
        assert texts == text


@pytest.mark.parametrize("style", TEMPLATES)
@given(text=st.text(st.characters(exclude_characters="<[{"), max_size=40))
def test_plain_text_is_not_touched(style: str, text: str) -> None:
    assert whole(style, text) == (text, "", [])


def test_only_what_may_be_a_mark_is_withheld() -> None:
    made = reader(style_of(TEMPLATES["hermes"]))
    assert made.feed("Hel") == [TextPart("Hel")]
    assert made.feed("lo <") == [TextPart("lo")]
    assert made.feed("b") == [TextPart(" <b")]
    assert made.feed(" \n") == ()
    assert made.feed("<tool_call>") == ()
    assert made.feed('{"name": "f", "argu') == ()
    assert made.feed('ments": {"a"') == [ToolCallPart(0, "call_0", "f"), ToolCallPart(0, arguments='{"a"')]
    assert made.feed(": 1") == [ToolCallPart(0, arguments=": 1")]
    assert made.feed("}") == [ToolCallPart(0, arguments="}")]
    assert made.feed("}\n</tool_call>\n") == ()
    assert made.finish() == []


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    for style in ("llama", "generic"):
        made = reader(style_of(TEMPLATES[style]))
        assert made.feed('{"answer"') == [TextPart('{"answer"')]
        assert made.feed(": 42") == [TextPart(": 42")]


def test_blanks_without_an_end_are_not_withheld_without_an_end() -> None:
    made = reader(style_of(TEMPLATES["hermes"]))
    texts = [part.text for _ in range(100) for part in made.feed("x" + " " * 50) if isinstance(part, TextPart)]
    texts += [part.text for _ in range(100) for part in made.feed(" " * 50) if isinstance(part, TextPart)]
    assert sum(map(len, texts)) >= 100 * 101 - MAX_BLANKS


def test_calls_beyond_the_most_that_may_be_are_left_out() -> None:
    assert whole("hermes", HERMES_F + "\n" + HERMES_G, max_calls=1)[2] == [("f", F_ARGUMENTS)]
    twice = "<|channel|>commentary to=functions.g<|message|>{}<|end|>" * 2
    assert whole("channels", twice, max_calls=1)[2] == [("g", "{}")]


def test_without_tools_calls_are_text_and_reasoning_is_still_told_apart() -> None:
    assert whole("hermes", f"<think>x</think>{HERMES_F}", tools=None) == (HERMES_F, "x", [])


def test_reasoning_may_be_left_out() -> None:
    assert whole("hermes", "<think>x</think>y", shows_reasoning=False) == ("y", "", [])
    analysis = "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>y"
    assert whole("channels", analysis, shows_reasoning=False) == ("y", "", [])


def test_what_the_prompt_has_opened_is_read_and_not_told() -> None:
    assert whole("hermes", "</think>\n<think>", primer="<think>") == ("<think>", "", [])
    assert whole("hermes", "\nhm\n</think>\n\nyes", primer="<think>") == ("yes", "hm", [])
    assert whole("mistral", '[{"name": "f", "arguments": {}}]', primer="[TOOL_CALLS]") == ("", "", [("f", "{}")])
    assert whole("mistral_named", '{"a": 1}', primer="[TOOL_CALLS]f[ARGS]") == ("", "", [("f", '{"a": 1}')])
    assert whole("channels", "{}", primer=HEAD) == ("", "", [("f", "{}")])
    assert whole("channels", "", primer=HEAD) == ("", "", [("f", "")])
    assert whole("mistral_named", "", primer="[TOOL_CALLS]f[ARGS]") == ("", "", [])


@settings(max_examples=60)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    size=st.integers(1, 9),
    style=st.sampled_from(["hermes", "llama", "mistral", "mistral_named", "listed", "tagged_list", "generic"]),
)
def test_arguments_arrive_exactly_as_they_are_written(value: Any, size: int, style: str) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    known = style_of(TEMPLATES[style])
    if style == "mistral_named":
        text = f"[TOOL_CALLS]f[ARGS]{arguments}"
    else:
        mark = known.call_marks[0]
        text = f'{mark}{{"name": "f", "{known.arguments_key}": {arguments}}}{known.call_close}'
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert told(read(reader(known), pieces)) == ("", "", [("f", arguments)])


@pytest.mark.parametrize("style", TEMPLATES)
def test_deep_and_long_output_is_read_without_falling_over(style: str) -> None:
    for text in ('{"name": "f", "arguments": ' + "[" * 20_000, "[" * 20_000, '"' * 20_000, "f(" * 20_000, "\\" * 9999):
        for mark in (*style_of(TEMPLATES[style]).call_marks, ""):
            read(reader(style_of(TEMPLATES[style])), [mark, *[text[i : i + 500] for i in range(0, len(text), 500)]])
